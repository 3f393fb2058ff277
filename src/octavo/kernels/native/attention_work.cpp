#include "attention_work.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {

namespace {

constexpr int64_t kStateFloats = int64_t{1}
                                 << 20;  // 4 MiB: 8 sequences of 8k tokens of SmolLM2 take a seventh

}  // namespace

void check_heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
    if (head_dim % 16 != 0 || head_dim < 16 || head_dim > 256)
        throw std::invalid_argument("head size " + std::to_string(head_dim) +
                                    " is not a multiple of 16 up to 256");
    if (num_heads < 1 || num_kv_heads < 1 || num_heads % num_kv_heads != 0)
        throw std::invalid_argument(std::to_string(num_heads) + " query heads do not divide among " +
                                    std::to_string(num_kv_heads) + " KV heads");
    if (num_heads / num_kv_heads > kMaxQueryVectors)
        throw std::invalid_argument(std::to_string(num_heads / num_kv_heads) +
                                    " query heads share a KV head; at most " +
                                    std::to_string(kMaxQueryVectors) + " can");
}

void check_block_size(int64_t block_size) {
    // Eight positions are scored at once, and a widened slice holds whole blocks.
    if (block_size < 8 || block_size % 8 != 0 || kSliceTokens % block_size != 0)
        throw std::invalid_argument("block size " + std::to_string(block_size) + " is not 8, 16, 32 or 64");
}

AttentionWork::AttentionWork(int num_threads, int max_rows, int num_heads, int num_kv_heads, int head_dim)
    : num_threads_(num_threads),
      num_heads_((check_heads(num_heads, num_kv_heads, head_dim), num_heads)),
      num_kv_heads_(num_kv_heads),
      head_dim_(head_dim),
      group_(num_heads / num_kv_heads),
      folds_(static_cast<size_t>(max_rows) * num_kv_heads),
      states_(new float[kStateFloats]) {
    for (int i = 0; i < num_threads; ++i)
        scratch_.emplace_back(new float[attention_scratch_floats(head_dim)]);
}

int64_t AttentionWork::nbytes() const {
    return 4 * (kStateFloats + static_cast<int64_t>(num_threads_) * attention_scratch_floats(head_dim_));
}

void AttentionWork::plan(const std::vector<Segment>& segments) {
    segments_ = segments;
    items_.clear();
    num_folds_ = 0;
    int64_t rows = 0;
    for (const Segment& segment : segments) rows += segment.num_rows;
    // Few rows are cut finer: at least eight tasks a thread where there are that many rows.
    const int64_t share = (rows * num_kv_heads_ + 8 * num_threads_ - 1) / (8 * num_threads_);
    const int rows_per_item = static_cast<int>(std::clamp<int64_t>(share, 1, kMaxQueryVectors / group_));
    const int64_t state_size = static_cast<int64_t>(group_) * (2 + head_dim_);
    int64_t states_used = 0;

    for (int s = 0; s < static_cast<int>(segments.size()); ++s) {
        const Segment& segment = segments[s];
        for (int row = 0; row < segment.num_rows; row += rows_per_item) {
            const int count = std::min(rows_per_item, segment.num_rows - row);
            const int length = segment.first_position + row + count;
            const int runs = (length + kRunTokens - 1) / kRunTokens;
            for (int head = 0; head < num_kv_heads_; ++head) {
                const bool split = count == 1 && runs > 1 && states_used + runs * state_size <= kStateFloats;
                if (!split) {
                    items_.push_back({s, row, count, head, 0, runs, -1, 0, int64_t{count} * length});
                    continue;
                }
                Fold& fold = folds_[num_folds_];
                fold.row = segment.first_row + row;
                fold.kv_head = head;
                fold.runs = runs;
                fold.states_offset = states_used;
                fold.remaining.store(runs, std::memory_order_relaxed);
                for (int run = 0; run < runs; ++run)
                    items_.push_back({s, row, 1, head, run, run + 1, num_folds_,
                                      states_used + run * state_size,
                                      std::min(length - run * kRunTokens, kRunTokens)});
                states_used += runs * state_size;
                ++num_folds_;
            }
        }
    }
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

void AttentionWork::run(const KernelTable& kernels, ThreadPool& pool, const PagedKV& kv, const float* q,
                        int q_stride, float* out, int out_stride, const Then& then) {
    pool.parallel_for(static_cast<int64_t>(items_.size()), 1, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t i = begin; i < end; ++i)
            run_item(items_[i], kernels, kv, q, q_stride, out, out_stride, scratch_[thread].get(), then);
    });
}

void AttentionWork::run_item(const Item& item, const KernelTable& kernels, const PagedKV& kv, const float* q,
                             int q_stride, float* out, int out_stride, float* scratch, const Then& then) {
    const Segment& segment = segments_[item.segment];
    const int row = segment.first_row + item.row;
    const int head = item.kv_head * group_ * head_dim_;
    AttentionTask task{};
    task.kv = kv;
    task.block_table = segment.block_table;
    task.q = q + static_cast<int64_t>(row) * q_stride + head;
    task.q_stride = q_stride;
    task.group = group_;
    task.kv_head = item.kv_head;
    task.first_position = segment.first_position + item.row;
    task.num_rows = item.num_rows;
    task.run_begin = item.run_begin;
    task.run_end = item.run_end;
    task.states = item.fold < 0 ? nullptr : states_.get() + item.states_offset;
    task.out = out + static_cast<int64_t>(row) * out_stride + head;
    task.out_stride = out_stride;
    task.scratch = scratch;
    kernels.attention(task);
    if (item.fold < 0) {
        if (then)
            for (int i = 0; i < item.num_rows; ++i) then(row + i, item.kv_head);
        return;
    }
    Fold& fold = folds_[item.fold];
    if (fold.remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    kernels.fold_states(states_.get() + fold.states_offset, fold.runs, group_, head_dim_, task.out);
    if (then) then(row, item.kv_head);
    // For the next layer, which begins after this loop.
    fold.remaining.store(fold.runs, std::memory_order_relaxed);
}

}  // namespace octavo
