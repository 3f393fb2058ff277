// How one layer's attention over a row tile is cut into tasks, the same for every layer of a step.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "thread_pool.h"

namespace octavo {

// Consecutive rows of a tile that are consecutive positions of one sequence.
struct Segment {
    int first_row;
    int num_rows;
    int first_position;
    const int32_t* block_table;
};

// Throw std::invalid_argument for heads, blocks, caps and types that the kernels do not have: head sizes are
// multiples of 16 up to 256, at most 48 query heads share a KV head, blocks have 8, 16, 32, 64, 128 or 256
// tokens, soft caps are 0 or 0.001 to 1,000, types are "f16" and "q8".
void check_heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim);
void check_block_size(int64_t block_size);
void check_soft_cap(float soft_cap);
KVType kv_type_named(const std::string& name);

class AttentionWork {
  public:
    // window: positions a row sees, its own included; 0: all. Throws what check_heads throws.
    AttentionWork(int num_threads, int max_rows, int num_heads, int num_kv_heads, int head_dim, int window);

    // Cuts the segments into tasks of at most 48 query vectors, longest first:
    //   (rows of one segment, KV head)      all their runs, folded by the task
    //   (one row, KV head, run)             where a segment has one row, so that a long context keeps every
    //                                       thread busy; states are folded by whoever finishes the last
    //   (one row each of several segments, KV head, run)   where their first block ids of a run are equal, if
    //                                       `share`: those are read once, unless too few tasks would be left
    //                                       for the threads
    // The bytes of the results do not depend on the cut.
    void plan(const std::vector<Segment>& segments, int block_size, bool share);

    // Within a pool's Session: q [rows][q_stride] (scaled), out [rows][out_stride]. then(row, kv_head):
    // called when the heads of a row that share a KV head are in `out`, by the thread that wrote them.
    using Then = std::function<void(int row, int kv_head)>;
    void run(const KernelTable& kernels, ThreadPool& pool, const PagedKV& kv, float soft_cap, const float* q,
             int q_stride, float* out, int out_stride, const Then& then = nullptr);

    int window() const { return window_; }
    int64_t nbytes() const;
    // Of the plan: positions of one KV head that tasks read, and that they would read if none were shared.
    int64_t kv_rows_read() const { return kv_rows_read_; }
    int64_t kv_rows_attended() const { return kv_rows_attended_; }

  private:
    struct Item {
        int kv_head;
        int first_row, num_rows;  // of rows_
        int run_begin, run_end;
        int common;  // see AttentionTask
        int64_t cost;
    };
    struct Row {
        int row;     // of the tile
        int length;  // positions up to its own
        const int32_t* block_table;
        int fold;  // index into folds_, or -1
        int run;   // of the fold's
    };
    struct Fold {
        int row, kv_head, runs;
        int64_t states_offset;  // floats
        std::atomic<int> remaining;
    };
    // Segments of one row, whose runs are tasks of their own.
    struct SplitRow {
        int row, length;
        const int32_t* block_table;
        int run_begin, run_end;
        int fold;  // of KV head 0; the others' follow
    };
    // A task, with the rows that it points to.
    struct Prepared {
        AttentionTask task;
        AttentionRow rows[kMaxQueryVectors];
        const Item* item;
    };
    struct Layer {
        const KernelTable& kernels;
        const PagedKV& kv;
        float soft_cap;
        const float* q;
        int q_stride;
        float* out;
        int out_stride;
        const Then& then;
    };
    struct Free {
        void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
    };

    int64_t state_floats() const { return static_cast<int64_t>(group_) * (2 + head_dim_); }
    void add_rows_of(const Segment& segment, int rows_at_once);
    bool split(const Segment& segment, int64_t& states_used);
    void add_runs(int block_size, bool share);
    int common_positions(const SplitRow& a, const SplitRow& b, int run, int block_size) const;
    void add_run(int run, const SplitRow* const* rows, int count, int common);
    void prepare(const Layer& layer, int64_t index, std::byte* scratch, Prepared& prepared) const;
    void finish(const Layer& layer, const Prepared& prepared);

    const int num_threads_, num_kv_heads_, head_dim_, group_, window_;
    std::vector<Item> items_;
    std::vector<Row> rows_;
    std::vector<SplitRow> split_rows_;
    std::vector<Fold> folds_;
    int num_folds_ = 0;
    int64_t kv_rows_read_ = 0, kv_rows_attended_ = 0;
    std::atomic<int64_t> next_item_{0};
    std::vector<std::unique_ptr<std::byte[], Free>> scratch_;  // a thread each
    std::unique_ptr<float[]> states_;
};

}  // namespace octavo
