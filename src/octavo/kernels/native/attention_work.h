// How one layer's attention over a row tile is cut into tasks, the same for every layer of a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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

// Throw std::invalid_argument for heads and for blocks that the kernels do not have: head sizes are multiples
// of 16 up to 256, at most 48 query heads share a KV head, blocks have 8, 16, 32 or 64 tokens.
void check_heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim);
void check_block_size(int64_t block_size);

class AttentionWork {
  public:
    // Throws what check_heads throws.
    AttentionWork(int num_threads, int max_rows, int num_heads, int num_kv_heads, int head_dim);

    // Cuts the segments into (rows, KV head) tasks of at most 48 query vectors; a single row is cut further
    // into its runs, while there is room for their states, so that one long context keeps every thread busy.
    // Longest first.
    void plan(const std::vector<Segment>& segments);

    // Within a pool's Session: q [rows][q_stride] (scaled), out [rows][out_stride]. then(row, kv_head):
    // called when the heads of a row that share a KV head are in `out`, by the thread that wrote them.
    using Then = std::function<void(int row, int kv_head)>;
    void run(const KernelTable& kernels, ThreadPool& pool, const PagedKV& kv, const float* q, int q_stride,
             float* out, int out_stride, const Then& then = nullptr);

    int64_t nbytes() const;

  private:
    struct Item {
        int segment, row, num_rows, kv_head;
        int run_begin, run_end;
        int fold;               // index into folds_, or -1
        int64_t states_offset;  // floats
        int64_t cost;
    };
    struct Fold {
        int row, kv_head, runs;
        int64_t states_offset;
        std::atomic<int> remaining;
    };

    void run_item(const Item& item, const KernelTable& kernels, const PagedKV& kv, const float* q,
                  int q_stride, float* out, int out_stride, float* scratch, const Then& then);

    const int num_threads_, num_heads_, num_kv_heads_, head_dim_, group_;
    std::vector<Segment> segments_;
    std::vector<Item> items_;
    std::vector<Fold> folds_;
    int num_folds_ = 0;
    std::vector<std::unique_ptr<float[]>> scratch_;  // a thread each
    std::unique_ptr<float[]> states_;
};

}  // namespace octavo
