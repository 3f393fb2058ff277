// A model as a flat list of operations, recorded once at load and run for every step.
//
// A step goes through the list once for each row tile (at most `row_tile` tokens). Every operation is shared
// by all threads and complete before the next begins, so a tile's KV is stored before the tile attends.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "attention_work.h"
#include "cpu_features.h"
#include "kernel_table.h"
#include "matrix.h"
#include "sampling.h"
#include "thread_pool.h"

namespace octavo {

// One step's ragged batch, as the model's Python side hands it over (octavo.model.batch.RaggedBatch).
struct Batch {
    const int32_t* token_ids;  // [num_tokens]
    int64_t num_tokens;
    const int32_t* chunk_starts;  // [num_seqs] absolute position of each chunk's first token
    const int32_t* chunk_lens;    // [num_seqs]
    int64_t num_seqs;
    const int32_t* table_offsets;  // [num_seqs + 1] into block_tables
    const int32_t* block_tables;
    int64_t num_table_entries;
};

// Rows of codes with their scales, filled by one operation and read by the next.
class ActivationBuffer {
  public:
    // Room for rows of k of the given ActivationCodes, which may be several; never shrinks.
    void reserve(int rows, int k, int codes);
    // x: values [first, first + count) of a row of k, in whole groups.
    void quantize(const KernelTable& kernels, int row, int k, int first, int count, const float* x,
                  int codes);
    Activations view(const float* x, int x_stride) const;
    int64_t nbytes() const;

  private:
    std::vector<int8_t> codes_;
    std::vector<int16_t> codes16_;
    std::vector<WideCode> wide_;
    std::vector<float> scales_, scaled_sums_, scales16_;
    std::vector<int32_t> sums_;
};

// out[rows, sum of out_features] (+)= x[rows, in_features] * matrices side by side. Within a Session.
// then(begin, end): called for columns [begin, end) of out by the thread that has computed them for all rows;
// they are `unit` panels of one matrix, or several units, or its last columns. after: [num_threads], what
// each thread reads when it is through with its share, to be fetched; or empty.
void linear(const KernelTable& kernels, ThreadPool& pool,
            const std::vector<std::shared_ptr<Matrix>>& matrices, const Activations& activations, int rows,
            float* out, int out_stride, bool accumulate, int unit = 1,
            const std::function<void(int64_t begin, int64_t end)>& then = nullptr,
            const std::vector<const uint8_t*>& after = {});

class Program {
  public:
    // row_tile: 1 ... 256 tokens. Throws std::invalid_argument.
    Program(std::shared_ptr<ThreadPool> pool, const std::string& instruction_set, int row_tile);

    // --- recording: buffers are float [row_tile][width]; an id stands for one ---
    int buffer(int width);
    void embed(std::shared_ptr<Matrix> table, int out);
    void rms_norm(int in, std::vector<float> weight, float eps, int out);
    void linear(int in, std::vector<std::shared_ptr<Matrix>> matrices, int out, bool accumulate);
    // qkv holds q [num_heads], k [num_kv_heads], v [num_kv_heads] side by side. Rotates q and k in place,
    // scales q by 1 / sqrt(head_dim), stores k and v to the row's slot, then attends over the sequence's
    // blocks into out. window: positions a row sees, its own included; 0: all. soft_cap: see AttentionTask.
    // Layers are numbered in the order of recording.
    void attention(int qkv, int out, int num_heads, int num_kv_heads, int head_dim, int window = 0,
                   float soft_cap = 0.0f);
    // out = silu(in * gate) * (in * up), where gate and up have equal sizes.
    void gated_linear(int in, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up, int out);
    // Final norm and output head, for the rows that need logits; the last operation.
    void logits(int in, std::vector<float> norm_weight, float eps, std::shared_ptr<Matrix> head);
    // cos and sin of position * inverse_frequencies[i], both times `magnitude` (1 except for YaRN).
    void rope(std::vector<double> inverse_frequencies, double magnitude);

    void bind(uint8_t* arena, int64_t extent_bytes, int64_t num_blocks, int block_size, KVType kv_type);
    // Whether sequences with equal blocks are attended together where that saves work. The bytes are the
    // same.
    void set_shared_prefix_attention(bool share) { share_prefixes_ = share; }
    bool shared_prefix_attention() const { return share_prefixes_; }
    // Of all steps since bind and all layers: positions of one KV head that were read for attention, and that
    // would have been if no sequences had been attended together.
    int64_t kv_rows_read() const { return kv_rows_read_; }
    int64_t kv_rows_attended() const { return kv_rows_attended_; }
    int64_t buffer_bytes() const;
    const char* instruction_set() const { return kernels_.name; }

    // Computes the step. samplers: [num_seqs], null where nothing is sampled; sampled: [num_seqs], filled
    // where a sampler is given. all_logits: null, or [num_tokens][vocab] which every row's logits go to.
    // Throws std::invalid_argument, before any work, for a batch that does not fit the model or the arena.
    void run(const Batch& batch, const std::vector<Sampler*>& samplers, std::vector<Sampled>& sampled,
             float* all_logits);

    int64_t vocab_size() const { return head_ ? head_->out_features() : 0; }

  private:
    struct Embed {
        std::shared_ptr<Matrix> table;
        int out;
    };
    struct RmsNorm {
        int in, out;
        std::vector<float> weight;
        float eps;
        int codes;  // ActivationCodes that the next operation reads
    };
    struct Quantize {
        int in, codes;
    };
    struct Linear {
        int in, out;
        std::vector<std::shared_ptr<Matrix>> matrices;
        bool accumulate;
        int slot;        // of activations_, its codes
        int rope_layer;  // whose q, k and v these are, to be rotated and stored as they come; or -1
        std::vector<const uint8_t*> after;  // weights that each thread reads next
    };
    struct RopeAndStore {
        int qkv, layer;
    };
    struct Attend {
        int qkv, out, layer, codes;
        size_t work;  // of attention_, by window
        float soft_cap;
    };
    struct GatedLinear {
        int in, out;
        std::shared_ptr<Matrix> gate, up;
        int64_t chunk;  // panels
        int64_t pieces() const { return (gate->num_panels() + chunk - 1) / chunk; }
        int slot;  // of activations_, the codes it reads; its own go to the other one
        int codes;
        bool writes_rows;                   // into `out`: where an operation reads more than codes
        std::vector<const uint8_t*> after;  // weights that each thread reads next
    };
    struct Logits {
        int in;
        std::vector<float> weight;
        float eps;
    };
    using Operation =
        std::variant<Embed, RmsNorm, Quantize, Linear, RopeAndStore, Attend, GatedLinear, Logits>;

    // The rows of the batch that one pass computes.
    struct Tile {
        int rows;
        const int32_t* token_ids;
        std::vector<Segment> segments;
        std::vector<int32_t> positions;  // [rows]
        std::vector<int64_t> blocks;     // [rows]
        std::vector<int> slots;          // [rows]
        std::vector<int> logit_rows;     // rows of the tile that need logits
        std::vector<int64_t>
            logit_targets;  // for each: the sequence, or the batch's row when all logits are wanted
    };

    void validate(const Batch& batch) const;
    void prepare_tile(const Batch& batch, int64_t first_token, const std::vector<Sampler*>& samplers,
                      bool all);
    float* row(int buffer, int64_t index) { return buffers_[buffer].get() + index * widths_[buffer]; }
    PagedKV paged_kv(int layer) const;
    // Has the rows of `in` quantised, by the operation that makes them where it can: one pass less. Returns
    // the slot of activations_ that holds them.
    int codes_of(int in, const std::vector<std::shared_ptr<Matrix>>& readers);
    void reads_rows(int in);
    // Panels that a product's threads take together.
    int linear_unit(const Linear& op) const;
    // Tells every product what weights each thread will read after it.
    void link_weights();
    void run_operation(const Operation& operation);
    void rope_and_store(int qkv, int layer, int64_t begin, int64_t end);
    void run_gated_linear(const GatedLinear& op);
    void run_logits(const Logits& op);
    int64_t rows_at_once(int rows) const;
    int64_t num_logit_blocks() const {
        return (vocab_size() + static_cast<int64_t>(kLogitBlock) - 1) / static_cast<int64_t>(kLogitBlock);
    }

    std::shared_ptr<ThreadPool> pool_;
    const KernelTable& kernels_;
    const int row_tile_;
    std::vector<Operation> operations_;
    std::vector<std::unique_ptr<float[]>> buffers_;
    std::vector<int> widths_;
    ActivationBuffer activations_[2];
    int num_layers_ = 0, num_heads_ = 0, num_kv_heads_ = 0, head_dim_ = 0;
    int64_t vocab_rows_ = 0;
    std::shared_ptr<Matrix> head_;
    int head_rows_ = 0;                                      // rows whose logits are held at once
    std::unique_ptr<float[]> head_input_, logits_, maxima_;  // maxima_: see block_maxima
    std::vector<double> inverse_frequencies_;
    double rope_magnitude_ = 1.0;
    std::unique_ptr<float[]> rope_cos_, rope_sin_;           // [row_tile][rope_dim / 2]
    std::vector<std::unique_ptr<AttentionWork>> attention_;  // one a window
    size_t gated_scratch_floats_ = 0;
    std::vector<std::unique_ptr<float[]>> gated_scratch_;  // a thread each

    uint8_t* arena_ = nullptr;
    int64_t extent_bytes_ = 0, num_blocks_ = 0;
    int block_size_ = 0;
    KVType kv_type_ = KVType::kF16;
    bool share_prefixes_ = true;
    int64_t kv_rows_read_ = 0, kv_rows_attended_ = 0;

    // Of the step that is running.
    Tile tile_;
    const std::vector<Sampler*>* samplers_ = nullptr;
    std::vector<Sampled>* sampled_ = nullptr;
    float* all_logits_ = nullptr;
};

}  // namespace octavo
