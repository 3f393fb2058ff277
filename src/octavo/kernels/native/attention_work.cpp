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
// What rows have in common of a run ends with a register of positions.
constexpr int kCommonStep = 16;
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
            items_.push_back({head, static_cast<int>(rows_.size()), count, first_run(first_length, window_),
                              (length + kRunTokens - 1) / kRunTokens, kRunTokens, int64_t{count} * seen});
            for (int i = 0; i < count; ++i)
                rows_.push_back({segment.first_row + row + i, first_length + i, segment.block_table, -1, 0});
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

// How many first positions of a run two rows see in the same blocks: full ones, and whole registers of them.
int AttentionWork::common_positions(const SplitRow& a, const SplitRow& b, int run, int block_size) const {
    const int start = run * kRunTokens, blocks_of_run = kRunTokens / block_size;
    const int32_t* first = a.block_table + run * blocks_of_run;
    const int32_t* second = b.block_table + run * blocks_of_run;
    const int seen = std::min({a.length - start, b.length - start, kRunTokens});
    int blocks = 0;
    while (blocks < seen / block_size && first[blocks] == second[blocks]) ++blocks;
    return blocks * block_size / kCommonStep * kCommonStep;
}

// The runs of all split rows. Rows that have the first blocks of a run in common are of one group.
void AttentionWork::add_runs(int block_size, bool share) {
    const int blocks_of_run = kRunTokens / block_size;
    int last_run = 0;
    for (const SplitRow& row : split_rows_) last_run = std::max(last_run, row.run_end);
    std::vector<const SplitRow*> rows;
    // Tasks that are left if every group of a run becomes one, to be kept above what the threads need.
    int64_t runs_of_all = 0;
    for (const SplitRow& row : split_rows_) runs_of_all += row.run_end - row.run_begin;
    for (int run = 0; run < last_run; ++run) {
        const int start = run * kRunTokens;
        rows.clear();
        for (const SplitRow& row : split_rows_) {
            if (run < row.run_begin || run >= row.run_end) continue;
            const SplitRow* pointer = &row;
            // A window that begins within the run is another one for every row.
            if (share && (window_ == 0 || row.length - window_ <= start))
                rows.push_back(pointer);
            else
                add_run(run, &pointer, 1, kRunTokens);
        }
        // Equal ids beside each other, in an order that does not depend on addresses.
        std::stable_sort(rows.begin(), rows.end(), [&](const SplitRow* a, const SplitRow* b) {
            const auto end = [&](const SplitRow* row) {
                return row->block_table + run * blocks_of_run +
                       std::min(row->length - start, kRunTokens) / block_size;
            };
            return std::lexicographical_compare(a->block_table + run * blocks_of_run, end(a),
                                                b->block_table + run * blocks_of_run, end(b));
        });
        for (size_t first = 0, last; first < rows.size(); first = last) {
            // As long as positions that are read once become more: (rows - 1) x what all have in common.
            int common = kRunTokens;
            for (last = first + 1; last < rows.size(); ++last) {
                const int count = static_cast<int>(last - first);
                const int with_next =
                    std::min(common, common_positions(*rows[last - 1], *rows[last], run, block_size));
                if (with_next * count <= (count > 1 ? common * (count - 1) : 0)) break;
                common = with_next;
            }
            // As many rows together as the kernel takes, and no more than leave every thread its tasks: of
            // runs_of_all * heads / rows of one size.
            const int64_t enough = std::max<int64_t>(
                1, runs_of_all * num_kv_heads_ / (static_cast<int64_t>(kTasksOfThread) * num_threads_));
            const size_t most = static_cast<size_t>(std::min<int64_t>(kMaxQueryVectors / group_, enough));
            size_t pieces = (last - first + most - 1) / most;
            for (size_t at = first; at < last; --pieces) {
                const size_t count = (last - at + pieces - 1) / pieces;
                add_run(run, &rows[at], static_cast<int>(count), count > 1 ? common : kRunTokens);
                at += count;
            }
        }
    }
}

// `common`: of the run's positions, those that the rows have in the same blocks; all where there is one row.
void AttentionWork::add_run(int run, const SplitRow* const* rows, int count, int common) {
    const int start = run * kRunTokens;
    int64_t read = 0, attended = 0;
    for (int i = 0; i < count; ++i) {
        const int low = window_ > 0 ? std::max(0, rows[i]->length - window_ - start) : 0;
        const int seen = std::min(rows[i]->length - start, kRunTokens) - low;
        attended += seen;
        read += i == 0 ? seen : std::max(0, seen - common);
    }
    for (int head = 0; head < num_kv_heads_; ++head) {
        items_.push_back({head, static_cast<int>(rows_.size()), count, run, run + 1, common, attended});
        for (int i = 0; i < count; ++i)
            rows_.push_back({rows[i]->row, rows[i]->length, rows[i]->block_table, rows[i]->fold + head,
                             run - rows[i]->run_begin});
        kv_rows_read_ += read;
        kv_rows_attended_ += attended;
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
                                      row.run * state_floats(),
                            row.block_table};
    }
    prepared.task = {.kv = layer.kv,
                     .kv_head = item.kv_head,
                     .group = group_,
                     .rows = prepared.rows,
                     .num_rows = item.num_rows,
                     .run_begin = item.run_begin,
                     .run_end = item.run_end,
                     .common = item.common,
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
