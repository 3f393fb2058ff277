// The functions that exist once per instruction set. Everything else in the native core is compiled once.
//
// Integer sums are exact, and each float result is one fixed chain of multiply-adds whatever the number of
// rows, threads or lanes (docs/kernels.md, "the determinism rule"). Where the multiply-adds are fused, which
// is everywhere but on SSE4.1, the bytes are those of the portable path.
#pragma once

#include <cstdint>

namespace octavo {

constexpr int kTileColumns = 8;    // output columns of a tile of eight lanes
constexpr int kPanelTiles = 4;     // tiles that lie group by group beside each other in memory
constexpr int kPanelColumns = 32;  // of a panel
constexpr int kGroup = 32;         // activations that share one scale
constexpr int kRunTokens = 256;    // positions whose attention state is computed from scratch, then folded

enum class WeightType : int {
    kF32,
    kF16,
    kBF16,
    kQ4_0,
    kQ4_1,
    kQ5_0,
    kQ5_1,
    kQ8_0,
    kQ2_K,
    kQ3_K,
    kQ4_K,
    kQ5_K,
    kQ6_K,
    kIQ4_NL,
    kIQ4_XS,
    kCount
};

// The largest value of a group of activations, which keeps a code of its own: quantised weights meet 8-bit
// codes, and one outlier would leave the 31 others few steps. Its place is told as the kernels need it.
struct WideCode {
    int16_t code;            // |code| <= 32,767
    int16_t zero;            // so that code and zero are a lane of two int16 factors
    int32_t nibble_shift;    // where its weights stand in a lane of a plane of 4 bits
    int32_t byte_shift;      // and of unpacked codes
    int32_t in_second_half;  // -1 where its place is one of the group's last 16, else 0
    int32_t first_half_sum;  // of the codes of the group's first 16 values, the wide one included
    uint16_t nibble_offset;  // of its vector in a plane of 4 bits, in bytes
    uint16_t at;             // its place in the group
};

// Which codes of a row a matrix reads.
enum ActivationCodes : int { kNoCodes = 0, kCodes8 = 1, kCodes16 = 2 };

// Rows of activations as the matmuls read them.
struct Activations {
    const float* x;  // [rows][x_stride], the unquantised rows (float weights)
    int x_stride;
    // For quantised weights: x is about scale * code, the largest of each group apart.
    const int8_t* codes;       // [rows][k], 0 where the wide code stands
    const WideCode* wide;      // [rows][k / 32]
    const float* scales;       // [rows][k / 32]
    const int32_t* sums;       // [rows][k / 32], sum of the codes of a group, the wide one included
    const float* scaled_sums;  // [rows][k / 32], scale * sum
    // For Q8_0.
    const int16_t* codes16;  // [rows][k]
    const float* scales16;   // [rows][k / 32]
};

// The rows from `row` on. Static: every path has its own, for its own instructions.
static inline Activations rows_from(Activations a, int row, int k) {
    if (row == 0) return a;
    const int64_t first = static_cast<int64_t>(row) * k, group = first / kGroup;
    a.x += static_cast<int64_t>(row) * a.x_stride;
    if (a.codes != nullptr) {
        a.codes += first;
        a.wide += group;
        a.scales += group;
        a.sums += group;
        a.scaled_sums += group;
    }
    if (a.codes16 != nullptr) {
        a.codes16 += first;
        a.scales16 += group;
    }
    return a;
}

struct MatmulTask {
    const uint8_t* panels;  // packed weights of panel 0
    int64_t panel_bytes;
    int k;
    int columns;  // real output columns; the last panel may be padded
    int64_t panel_begin, panel_end;
    const uint8_t* follows;  // weights that this thread reads after these, to be fetched meanwhile; or null
    Activations activations;
    int rows;
    float* out;  // [rows][out_stride]
    int out_stride;
    bool accumulate;  // out += result (the residual stream)
};

// How keys and values are stored. kQ8: int8 codes and a float scale for each token and head.
enum class KVType : int { kF16, kQ8 };

// One layer of one arena. A block holds for this layer the keys of every KV head, then the values of every
// KV head:
//   kF16   keys f16 [head_dim][block_size]                       values f16 [block_size][head_dim]
//   kQ8    keys int8 [head_dim / 2][block_size][2]               values int8 [block_size / 2][head_dim][2]
//          scales float [block_size]                             scales float [block_size]
struct PagedKV {
    uint8_t* arena;
    int64_t extent_bytes;
    int64_t layer_offset;  // bytes from the start of a block to this layer's keys
    int num_kv_heads;
    int head_dim;
    int block_size;
    KVType type;
};

// Bytes of one KV head's keys, or of its values, in a block.
static constexpr int64_t kv_head_bytes(KVType type, int head_dim, int block_size) {
    return static_cast<int64_t>(block_size) * (type == KVType::kF16 ? 2 * head_dim : head_dim + 4);
}

// The first run that a row of this length sees something of; window 0: all before it.
static constexpr int first_run(int length, int window) {
    return window > 0 && length > window ? (length - window) / kRunTokens : 0;
}

// A row whose queries one attention task computes: the heads of a group that share the task's KV head.
struct AttentionRow {
    const float* q;  // [group][head_dim], already scaled, and for kQ8 rotated
    int length;      // positions it may see: its own and all before
    float* out;      // [group][head_dim]
    float* state;    // not null: no `out`, but the state of the task's one run [group][2 + head_dim]; so for
                     // all rows of a task or none
    const int32_t* block_table;  // its sequence's
};

// Rows over runs [run_begin, run_end) of one KV head. Either consecutive positions of one sequence, or rows
// of several over one run, of which they see the first `common` positions and have them in the same blocks.
struct AttentionTask {
    PagedKV kv;
    int kv_head;
    int group;  // query heads per KV head
    const AttentionRow* rows;
    int num_rows;
    int run_begin, run_end;
    int common;      // a multiple of 16; 256 where all positions are every row's
    int window;      // positions a row sees, its own included; 0: all (Beltagy et al. 2020)
    float soft_cap;  // scores become soft_cap * tanh(score / soft_cap); 0: they do not (Gemma Team 2024)
    void* scratch;   // attention_scratch_bytes(head_dim), at a multiple of 64
    bool fetched;    // this task's first keys were the `next` of another on this thread
    const AttentionTask* next;  // whose first keys this thread wants then; or null. Only kv, kv_head, rows
                                // and runs are read.
};

// Query vectors (rows x heads of a group) that one attention task may hold.
constexpr int kMaxQueryVectors = 48;
// Of keys, or values, that are widened at once where many query vectors read them: half of a first-level
// cache.
constexpr int kSliceBytes = 16384;

struct KernelTable {
    const char* name;

    // Nearest-even codes in groups of 32; n is a multiple of 32. A group that is not finite gets a NaN scale,
    // one whose scale would not be a normal number zero codes.
    void (*quantize_row8)(const float* x, int n, int8_t* codes, WideCode* wide, float* scales, int32_t* sums,
                          float* scaled_sums);
    void (*quantize_row16)(const float* x, int n, int16_t* codes, float* scales);
    // out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).
    void (*rms_norm_row)(const float* x, const float* weight, int n, float eps, float* out);
    // out = gate / (1 + exp(-gate)) * up (Shazeer 2020, SwiGLU).
    void (*silu_mul_row)(const float* gate, const float* up, int n, float* out);
    // Rotates pairs (2i, 2i + 1) of one head by cos/sin[i], then multiplies the head by `scale` (Su et al.
    // 2021).
    void (*rope_head)(float* x, int head_dim, int rope_dim, const float* cos, const float* sin, float scale);
    // One token's key, or value, of one KV head, float [head_dim], to its slot of its block. kQ8: nearest
    // even codes of x / scale, scale = max |x| / 127; a head that is not finite gets a NaN scale, one whose
    // scale would not be a normal number zero codes.
    void (*store_key)(const PagedKV& kv, int64_t block, int slot, int kv_head, const float* key);
    void (*store_value)(const PagedKV& kv, int64_t block, int slot, int kv_head, const float* value);
    // q [head_dim] as attention over kQ8 expects it: rotated as keys are, so that products stay the same.
    void (*rotate_query)(float* q, int head_dim);
    void (*attention)(const AttentionTask& task);
    // Folds `runs` states of one KV head's group, in position order, into out [group][head_dim] (Milakov and
    // Gimelshein 2018; Dao et al. 2022).
    void (*fold_states)(const float* states, int runs, int group, int head_dim, float* out);
    void (*matmul[static_cast<int>(WeightType::kCount)])(const MatmulTask& task);

    // Independent multiply-adds in registers, the machine's limits for `octavo bench kernels`. Returns
    // operations done. peak_int8 widens each product of 8-bit numbers, peak_int8_summed as many of 4-bit
    // codes together as 16 bits hold.
    double (*peak_fma)(int64_t iterations);
    double (*peak_int8)(int64_t iterations);
    double (*peak_int8_summed)(int64_t iterations);
    // Sums `bytes` bytes: read bandwidth. Returns the sum so that it is not optimised away.
    double (*read_bytes)(const uint8_t* data, int64_t bytes);
};

// Rounded up for each part to a line.
static constexpr int64_t attention_scratch_bytes(int head_dim) {
    return int64_t{kMaxQueryVectors} * (6 * kRunTokens + 14 * head_dim) + kSliceBytes + 8 * kRunTokens +
           10 * 64;
}

const KernelTable& portable_kernels();
// Null where they were not compiled.
const KernelTable* avx2_kernels();
const KernelTable* avxvnni_kernels();
const KernelTable* avx512vnni_kernels();
const KernelTable* sse41_kernels();
const KernelTable* neon_kernels();

}  // namespace octavo
