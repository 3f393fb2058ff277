#include "attention_work.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace octavo {

namespace {

// 4 MiB: 8 sequences of 8k tokens of SmolLM2 take a seventh.
constexpr int64_t kStateFloats = int64_t{1} << 20;
// As many tasks a thread keep the threads evenly busy, the longest first.
constexpr int kTasksOfThread = 4;
// A capped score is off by up to cap x 2^-22: larger caps would leave little of a score.
constexpr float kSmallestSoftCap = 1e-3f, kLargestSoftCap = 1e3f;

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
    // Eight positions are scored at once, and a run holds whole blocks.
    if (block_size < 8 || block_size % 8 != 0 || kRunTokens % block_size != 0)
        throw std::invalid_argument("block size " + std::to_string(block_size) +
                                    " is not 8, 16, 32, 64, 128 or 256");
}

void check_soft_cap(float soft_cap) {
    if (soft_cap == 0.0f || (soft_cap >= kSmallestSoftCap && soft_cap <= kLargestSoftCap)) return;
    std::ostringstream text;
    text << "scores cannot be capped at " << soft_cap << "; 0 leaves them as they are, else "
         << kSmallestSoftCap << " to " << kLargestSoftCap;
    throw std::invalid_argument(text.str());
}

KVType kv_type_named(const std::string& name) {
    if (name == "f16") return KVType::kF16;
    if (name == "q8") return KVType::kQ8;
    throw std::invalid_argument("keys and values are stored as f16 or q8, not as '" + name + "'");
}

AttentionWork::AttentionWork(int num_threads, int max_rows, int num_heads, int num_kv_heads, int head_dim,
                             int window)
    : num_threads_(num_threads),
      num_kv_heads_((check_heads(num_heads, num_kv_heads, head_dim), num_kv_heads)),
      head_dim_(head_dim),
      group_(num_heads / num_kv_heads),
      window_(window),
      folds_(static_cast<size_t>(max_rows) * num_kv_heads),
      states_(new float[kStateFloats]) {
    if (window < 0) throw std::invalid_argument("a window of " + std::to_string(window) + " positions");
    for (int i = 0; i < num_threads; ++i)
        scratch_.emplace_back(static_cast<std::byte*>(
            ::operator new[](static_cast<size_t>(attention_scratch_bytes(head_dim)), std::align_val_t{64})));
}

int64_t AttentionWork::nbytes() const {
    return 4 * kStateFloats + num_threads_ * attention_scratch_bytes(head_dim_);
}

void AttentionWork::plan(const std::vector<Segment>& segments, int block_size, bool share) {
    items_.clear();
    rows_.clear();
    split_rows_.clear();
    num_folds_ = 0;
    kv_rows_read_ = kv_rows_attended_ = 0;
    int64_t rows = 0, states_used = 0;
    for (const Segment& segment : segments) rows += segment.num_rows;
    // Few rows are cut finer, so that there are tasks enough.
    const int64_t tasks = kTasksOfThread * num_threads_;
    const int rows_at_once = static_cast<int>(
        std::clamp<int64_t>((rows * num_kv_heads_ + tasks - 1) / tasks, 1, kMaxQueryVectors / group_));
    for (const Segment& segment : segments)
        if (segment.num_rows > 1 || !split(segment, states_used)) add_rows_of(segment, rows_at_once);
    add_runs(block_size, share);
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

void AttentionWork::add_rows_of(const Segment& segment, int rows_at_once) {
    for (int row = 0; row < segment.num_rows; row += rows_at_once) {
        const int count = std::min(rows_at_once, segment.num_rows - row);
        const int first_length = segment.first_position + row + 1, length = first_length + count - 1;
        const int seen = length - (window_ > 0 ? std::max(0, first_length - window_) : 0);
        for (int head = 0; head < num_kv_heads_; ++head) {
            items_.push_back({segment.block_table, head, static_cast<int>(rows_.size()), count,
                              first_run(first_length, window_), (length + kRunTokens - 1) / kRunTokens,
                              int64_t{count} * seen});
            for (int i = 0; i < count; ++i)
                rows_.push_back({segment.first_row + row + i, first_length + i, -1, 0});
            kv_rows_read_ += seen;
            kv_rows_attended_ += seen;
        }
    }
}

// Whether the row of a segment of one has several runs, and room for their states: then its runs are noted.
bool AttentionWork::split(const Segment& segment, int64_t& states_used) {
    const int length = segment.first_position + 1;
    const int begin = first_run(length, window_), end = (length + kRunTokens - 1) / kRunTokens;
    const int64_t floats = (end - begin) * state_floats() * num_kv_heads_;
    if (end - begin < 2 || states_used + floats > kStateFloats) return false;
    split_rows_.push_back({segment.first_row, length, segment.block_table, begin, end, num_folds_});
    for (int head = 0; head < num_kv_heads_; ++head) {
        Fold& fold = folds_[num_folds_++];
        fold.row = segment.first_row;
        fold.kv_head = head;
        fold.runs = end - begin;
        fold.states_offset = states_used + head * fold.runs * state_floats();
        fold.remaining.store(fold.runs, std::memory_order_relaxed);
    }
    states_used += floats;
    return true;
}

// The runs of all split rows. Rows that see all of a run and have the same block ids there are of one group.
void AttentionWork::add_runs(int block_size, bool share) {
    const int blocks_of_run = kRunTokens / block_size;
    int last_run = 0;
    for (const SplitRow& row : split_rows_) last_run = std::max(last_run, row.run_end);
    std::vector<const SplitRow*> whole;
    std::vector<std::pair<size_t, size_t>> groups;  // of `whole`
    const auto ids = [&](const SplitRow* row, int run) { return row->block_table + run * blocks_of_run; };
    // Tasks that are left if every group of a run becomes one, to be kept above what the threads need.
    int64_t runs_of_all = 0;
    for (const SplitRow& row : split_rows_) runs_of_all += row.run_end - row.run_begin;
    for (int run = 0; run < last_run; ++run) {
        const int start = run * kRunTokens;
        whole.clear();
        for (const SplitRow& row : split_rows_) {
            if (run < row.run_begin || run >= row.run_end) continue;
            const SplitRow* pointer = &row;
            const int low = window_ > 0 ? std::max(0, row.length - window_ - start) : 0;
            if (share && low == 0 && row.length >= start + kRunTokens)
                whole.push_back(pointer);
            else
                add_run(run, &pointer, 1, std::min(row.length - start, kRunTokens) - low);
        }
        // Equal ids beside each other, in an order that does not depend on addresses.
        std::stable_sort(whole.begin(), whole.end(), [&](const SplitRow* a, const SplitRow* b) {
            return std::lexicographical_compare(ids(a, run), ids(a, run) + blocks_of_run, ids(b, run),
                                                ids(b, run) + blocks_of_run);
        });
        for (size_t first = 0, last; first < whole.size(); first = last) {
            for (last = first + 1; last < whole.size(); ++last)
                if (std::memcmp(ids(whole[first], run), ids(whole[last], run),
                                sizeof(int32_t) * static_cast<size_t>(blocks_of_run)) != 0)
                    break;
            // As many rows together as the kernel takes, and no more than leave every thread its tasks: of
            // runs_of_all * heads / rows of one size.
            const int64_t enough = std::max<int64_t>(
                1, runs_of_all * num_kv_heads_ / (static_cast<int64_t>(kTasksOfThread) * num_threads_));
            const size_t most = static_cast<size_t>(std::min<int64_t>(kMaxQueryVectors / group_, enough));
            size_t pieces = (last - first + most - 1) / most;
            for (size_t at = first; at < last; --pieces) {
                const size_t count = (last - at + pieces - 1) / pieces;
                add_run(run, &whole[at], static_cast<int>(count), kRunTokens);
                at += count;
            }
        }
    }
}

void AttentionWork::add_run(int run, const SplitRow* const* rows, int count, int tokens) {
    for (int head = 0; head < num_kv_heads_; ++head) {
        items_.push_back({rows[0]->block_table, head, static_cast<int>(rows_.size()), count, run, run + 1,
                          int64_t{count} * tokens});
        for (int i = 0; i < count; ++i)
            rows_.push_back({rows[i]->row, rows[i]->length, rows[i]->fold + head, run - rows[i]->run_begin});
        kv_rows_read_ += tokens;
        kv_rows_attended_ += int64_t{count} * tokens;
    }
}

void AttentionWork::run(const KernelTable& kernels, ThreadPool& pool, const PagedKV& kv, float soft_cap,
                        const float* q, int q_stride, float* out, int out_stride, const Then& then) {
    const Layer layer{kernels, kv, soft_cap, q, q_stride, out, out_stride, then};
    const int64_t count = static_cast<int64_t>(items_.size());
    next_item_.store(0, std::memory_order_relaxed);
    // A thread holds the task it computes and the one after it, whose first keys it fetches meanwhile.
    pool.parallel_for(std::min<int64_t>(num_threads_, count), 1, [&](int64_t, int64_t, int thread) {
        Prepared prepared[2];
        int at = 0;
        bool fetched = false;
        int64_t index = next_item_.fetch_add(1, std::memory_order_relaxed);
        if (index < count) prepare(layer, index, scratch_[thread].get(), prepared[at]);
        while (index < count) {
            const int64_t next = next_item_.fetch_add(1, std::memory_order_relaxed);
            AttentionTask& task = prepared[at].task;
            task.fetched = fetched;
            if (next < count) {
                prepare(layer, next, scratch_[thread].get(), prepared[1 - at]);
                task.next = &prepared[1 - at].task;
            }
            kernels.attention(task);
            finish(layer, prepared[at]);
            fetched = true;
            at = 1 - at;
            index = next;
        }
    });
}

void AttentionWork::prepare(const Layer& layer, int64_t index, std::byte* scratch, Prepared& prepared) const {
    const Item& item = items_[static_cast<size_t>(index)];
    const int head = item.kv_head * group_ * head_dim_;
    prepared.item = &item;
    for (int i = 0; i < item.num_rows; ++i) {
        const Row& row = rows_[static_cast<size_t>(item.first_row + i)];
        prepared.rows[i] = {layer.q + static_cast<int64_t>(row.row) * layer.q_stride + head, row.length,
                            layer.out + static_cast<int64_t>(row.row) * layer.out_stride + head,
                            row.fold < 0
                                ? nullptr
                                : states_.get() + folds_[static_cast<size_t>(row.fold)].states_offset +
                                      row.run * state_floats()};
    }
    prepared.task = {.kv = layer.kv,
                     .block_table = item.block_table,
                     .kv_head = item.kv_head,
                     .group = group_,
                     .rows = prepared.rows,
                     .num_rows = item.num_rows,
                     .run_begin = item.run_begin,
                     .run_end = item.run_end,
                     .window = window_,
                     .soft_cap = layer.soft_cap,
                     .scratch = scratch,
                     .fetched = false,
                     .next = nullptr};
}

void AttentionWork::finish(const Layer& layer, const Prepared& prepared) {
    const Item& item = *prepared.item;
    for (int i = 0; i < item.num_rows; ++i) {
        const Row& row = rows_[static_cast<size_t>(item.first_row + i)];
        if (row.fold >= 0) {
            Fold& fold = folds_[static_cast<size_t>(row.fold)];
            if (fold.remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
            layer.kernels.fold_states(states_.get() + fold.states_offset, fold.runs, group_, head_dim_,
                                      prepared.rows[i].out);
            // For the next layer, which begins after this loop.
            fold.remaining.store(fold.runs, std::memory_order_relaxed);
        }
        if (layer.then) layer.then(row.row, item.kv_head);
    }
}

}  // namespace octavo
