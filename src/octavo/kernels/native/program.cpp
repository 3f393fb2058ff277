#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace octavo {

namespace {

constexpr int64_t kLogitsBytes = int64_t{8} << 20;
// A piece of a gate and of its up: rows, and bytes of the weights of both, that are in cache together.
constexpr int kGatedRows = 64;
constexpr int64_t kGatedBytes = int64_t{256} << 10;
constexpr int64_t kGatedPanels = 8;
// Floats of rows that one thread is through with before another one has heard of them.
constexpr int kAloneFloats = 4096;
// Panels after which what follows a product is done: 64 rows of them are 64 KB.
constexpr int64_t kThenPanels = 8;
// Panels of the head that are taken together.
constexpr int kHeadUnit = 2;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string text(int64_t number) { return std::to_string(number); }

// All of it but the columns and where they go.
MatmulTask matmul_task(const Matrix& matrix, const Activations& activations, int rows) {
    MatmulTask task{};
    task.panels = matrix.panels();
    task.panel_bytes = matrix.panel_bytes();
    task.k = static_cast<int>(matrix.in_features());
    task.columns = static_cast<int>(matrix.out_features());
    task.activations = activations;
    task.rows = rows;
    return task;
}

// How a product of some matrices side by side is dealt out: in units of panels, several of them a chunk.
struct LinearWork {
    LinearWork(const std::vector<std::shared_ptr<Matrix>>& matrices, int unit, const ThreadPool& pool)
        : matrices(matrices), unit(unit) {
        for (const auto& matrix : matrices) total += units_of(*matrix);
        chunk = std::max<int64_t>(1, total / (8 * pool.num_threads()));
    }
    int64_t units_of(const Matrix& matrix) const { return (matrix.num_panels() + unit - 1) / unit; }
    // Units [first_own(t), first_own(t + 1)) are thread t's.
    int64_t first_own(const ThreadPool& pool, int thread) const {
        const int64_t chunks = (total + chunk - 1) / chunk;
        return std::min(total, pool.first_own_chunk(chunks, thread) * chunk);
    }
    // Null behind the last one.
    const uint8_t* weights_at(int64_t at) const {
        for (const auto& matrix : matrices) {
            if (at < units_of(*matrix)) return matrix->panels() + at * unit * matrix->panel_bytes();
            at -= units_of(*matrix);
        }
        return nullptr;
    }

    const std::vector<std::shared_ptr<Matrix>>& matrices;
    const int unit;
    int64_t total = 0, chunk;  // units
};

}  // namespace

void ActivationBuffer::reserve(int rows, int k, int codes) {
    const size_t values = static_cast<size_t>(rows) * k;
    const auto grow = [](auto& array, size_t size) { array.resize(std::max(array.size(), size)); };
    if (codes & kCodes8) {
        grow(codes_, values);
        grow(wide_, values / kGroup);
        grow(scales_, values / kGroup);
        grow(sums_, values / kGroup);
        grow(scaled_sums_, values / kGroup);
    }
    if (codes & kCodes16) {
        grow(codes16_, values);
        grow(scales16_, values / kGroup);
    }
}

void ActivationBuffer::quantize(const KernelTable& kernels, int row, int k, int first, int count,
                                const float* x, int codes) {
    const int64_t at = static_cast<int64_t>(row) * k + first;
    const int64_t group = at / kGroup;
    if (codes & kCodes8)
        kernels.quantize_row8(x, count, codes_.data() + at, wide_.data() + group, scales_.data() + group,
                              sums_.data() + group, scaled_sums_.data() + group);
    if (codes & kCodes16) kernels.quantize_row16(x, count, codes16_.data() + at, scales16_.data() + group);
}

Activations ActivationBuffer::view(const float* x, int x_stride) const {
    Activations view{};
    view.x = x;
    view.x_stride = x_stride;
    view.codes = codes_.data();
    view.wide = wide_.data();
    view.scales = scales_.data();
    view.sums = sums_.data();
    view.scaled_sums = scaled_sums_.data();
    view.codes16 = codes16_.data();
    view.scales16 = scales16_.data();
    return view;
}

int64_t ActivationBuffer::nbytes() const {
    const auto bytes = [](const auto& array) {
        return static_cast<int64_t>(array.size() * sizeof(array[0]));
    };
    return bytes(codes_) + bytes(codes16_) + bytes(wide_) + bytes(scales_) + bytes(scaled_sums_) +
           bytes(scales16_) + bytes(sums_);
}

void linear(const KernelTable& kernels, ThreadPool& pool,
            const std::vector<std::shared_ptr<Matrix>>& matrices, const Activations& activations, int rows,
            float* out, int out_stride, bool accumulate, int unit,
            const std::function<void(int64_t begin, int64_t end)>& then,
            const std::vector<const uint8_t*>& after) {
    const LinearWork work(matrices, unit, pool);
    pool.parallel_for(work.total, work.chunk, [&](int64_t begin, int64_t end, int thread) {
        // Chunks that are taken from others come from their ends: what follows there is not ours.
        const uint8_t* next = nullptr;
        if (begin >= work.first_own(pool, thread) && end < work.first_own(pool, thread + 1))
            next = work.weights_at(end);
        else if (end == work.first_own(pool, thread + 1) && !after.empty())
            next = after[thread];
        int64_t first_unit = 0, first_column = 0;
        for (const auto& matrix : matrices) {
            const int64_t units = work.units_of(*matrix);
            const int64_t from = std::max(begin - first_unit, int64_t{0}) * unit;
            const int64_t to = std::min(std::min(end - first_unit, units) * unit, matrix->num_panels());
            // In pieces whose results are still in cache when `then` comes for them.
            const int64_t piece = then ? std::max(kThenPanels / unit, int64_t{1}) * unit : to - from;
            for (int64_t panel = from; panel < to; panel += piece) {
                MatmulTask task = matmul_task(*matrix, activations, rows);
                task.panel_begin = panel;
                task.panel_end = std::min(panel + piece, to);
                if (task.panel_end < to)
                    task.follows = task.panels + task.panel_end * task.panel_bytes;
                else
                    task.follows = end <= first_unit + units ? next : work.weights_at(first_unit + units);
                task.out = out + first_column;
                task.out_stride = out_stride;
                task.accumulate = accumulate;
                kernels.matmul[static_cast<int>(matrix->type())](task);
                if (then)
                    then(first_column + panel * kPanelColumns,
                         first_column + std::min(task.panel_end * kPanelColumns, matrix->out_features()));
            }
            first_unit += units;
            first_column += matrix->out_features();
        }
    });
}

Program::Program(std::shared_ptr<ThreadPool> pool, const std::string& instruction_set, int row_tile)
    : pool_(std::move(pool)), kernels_(select_kernels(instruction_set)), row_tile_(row_tile) {
    if (row_tile < 1 || row_tile > 256) refuse("a row tile has 1 to 256 tokens, not " + text(row_tile));
}

int Program::buffer(int width) {
    buffers_.emplace_back(new float[static_cast<size_t>(row_tile_) * width]);
    widths_.push_back(width);
    return static_cast<int>(widths_.size()) - 1;
}

void Program::embed(std::shared_ptr<Matrix> table, int out) {
    if (table->in_features() != widths_.at(out))
        refuse("embeddings of " + text(table->in_features()) + " do not fit a buffer of " +
               text(widths_[out]));
    vocab_rows_ = table->out_features();
    operations_.push_back(Embed{std::move(table), out});
}

void Program::rms_norm(int in, std::vector<float> weight, float eps, int out) {
    if (static_cast<int>(weight.size()) != widths_.at(in) || widths_.at(out) != widths_[in])
        refuse("a norm of " + text(weight.size()) + " does not fit buffers of " + text(widths_[in]) +
               " and " + text(widths_[out]));
    reads_rows(in);
    operations_.push_back(RmsNorm{in, out, std::move(weight), eps, kNoCodes});
}

void Program::linear(int in, std::vector<std::shared_ptr<Matrix>> matrices, int out, bool accumulate) {
    int64_t columns = 0;
    for (const auto& matrix : matrices) {
        if (matrix->in_features() != widths_.at(in))
            refuse("a matrix over " + text(matrix->in_features()) + " does not fit a buffer of " +
                   text(widths_[in]));
        columns += matrix->out_features();
    }
    if (in == out) refuse("a product cannot replace the rows it reads");
    if (columns != widths_.at(out))
        refuse("matrices of " + text(columns) + " columns do not fit a buffer of " + text(widths_[out]));
    if (accumulate) reads_rows(out);
    const int slot = codes_of(in, matrices);
    operations_.push_back(Linear{in, out, std::move(matrices), accumulate, slot, -1, {}});
}

void Program::reads_rows(int in) {
    for (auto op = operations_.rbegin(); op != operations_.rend(); ++op)
        if (auto* gated = std::get_if<GatedLinear>(&*op); gated && gated->out == in) {
            gated->writes_rows = true;
            return;
        }
}

int Program::codes_of(int in, const std::vector<std::shared_ptr<Matrix>>& matrices) {
    int codes = kNoCodes;
    for (const auto& matrix : matrices) {
        codes |= matrix->activation_codes();
        if (matrix->activation_codes() == kNoCodes) reads_rows(in);
    }
    if (codes == kNoCodes) return 0;
    int slot = 0;
    Operation* last = operations_.empty() ? nullptr : &operations_.back();
    if (auto* norm = last ? std::get_if<RmsNorm>(last) : nullptr; norm && norm->out == in) {
        norm->codes |= codes;
    } else if (auto* gated = last ? std::get_if<GatedLinear>(last) : nullptr; gated && gated->out == in) {
        gated->codes |= codes;
        slot = 1 - gated->slot;
    } else if (auto* attend = last ? std::get_if<Attend>(last) : nullptr;
               attend && attend->out == in && num_heads_ / num_kv_heads_ * head_dim_ % kGroup == 0) {
        attend->codes |= codes;
    } else {
        reads_rows(in);
        operations_.push_back(Quantize{in, codes});
    }
    activations_[slot].reserve(row_tile_, widths_[in], codes);
    return slot;
}

void Program::attention(int qkv, int out, int num_heads, int num_kv_heads, int head_dim, int window,
                        float soft_cap) {
    check_heads(num_heads, num_kv_heads, head_dim);
    if (widths_.at(qkv) != (num_heads + 2 * num_kv_heads) * head_dim ||
        widths_.at(out) != num_heads * head_dim)
        refuse("buffers of " + text(widths_[qkv]) + " and " + text(widths_[out]) + " do not fit " +
               text(num_heads) + " + 2 x " + text(num_kv_heads) + " heads of " + text(head_dim));
    if (num_layers_ > 0 &&
        (num_heads != num_heads_ || num_kv_heads != num_kv_heads_ || head_dim != head_dim_))
        refuse("layers of one group have equal heads");
    check_soft_cap(soft_cap);
    num_heads_ = num_heads;
    num_kv_heads_ = num_kv_heads;
    head_dim_ = head_dim;
    size_t work = 0;
    while (work < attention_.size() && attention_[work]->window() != window) ++work;
    if (work == attention_.size())
        attention_.push_back(std::make_unique<AttentionWork>(pool_->num_threads(), row_tile_, num_heads,
                                                             num_kv_heads, head_dim, window));
    reads_rows(qkv);
    // The product that makes q, k and v takes them along, head by head, where its matrices hold whole heads.
    Operation* last = operations_.empty() ? nullptr : &operations_.back();
    auto* made = last ? std::get_if<Linear>(last) : nullptr;
    const auto whole_heads = [&](const auto& matrix) { return matrix->out_features() % head_dim == 0; };
    if (made && made->out == qkv && !made->accumulate &&
        std::all_of(made->matrices.begin(), made->matrices.end(), whole_heads))
        made->rope_layer = num_layers_;
    else
        operations_.push_back(RopeAndStore{qkv, num_layers_});
    operations_.push_back(Attend{qkv, out, num_layers_, kNoCodes, work, soft_cap});
    ++num_layers_;
}

void Program::gated_linear(int in, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up, int out) {
    for (const auto& matrix : {gate, up})
        if (matrix->in_features() != widths_.at(in) || matrix->out_features() != widths_.at(out))
            refuse("a matrix of " + text(matrix->out_features()) + " over " + text(matrix->in_features()) +
                   " does not fit buffers of " + text(widths_[in]) + " and " + text(widths_[out]));
    if (in == out) refuse("a product cannot replace the rows it reads");
    const int slot = codes_of(in, {gate, up});
    const int64_t chunk =
        std::clamp<int64_t>(std::min(gate->num_panels() / (4 * pool_->num_threads()),
                                     kGatedBytes / (gate->panel_bytes() + up->panel_bytes())),
                            1, kGatedPanels);
    const size_t floats = size_t{2} * kGatedRows * chunk * kPanelColumns;
    if (floats > gated_scratch_floats_) {
        gated_scratch_floats_ = floats;
        gated_scratch_.clear();
        for (int i = 0; i < pool_->num_threads(); ++i) gated_scratch_.emplace_back(new float[floats]);
    }
    operations_.push_back(
        GatedLinear{in, out, std::move(gate), std::move(up), chunk, slot, kNoCodes, false, {}});
}

int Program::linear_unit(const Linear& op) const {
    return op.rope_layer < 0 ? 1 : std::lcm(head_dim_, kPanelColumns) / kPanelColumns;
}

void Program::link_weights() {
    const int threads = pool_->num_threads();
    std::vector<const uint8_t*> after;
    const auto starts_of = [&](const LinearWork& work) {
        std::vector<const uint8_t*> starts;
        for (int t = 0; t < threads; ++t) starts.push_back(work.weights_at(work.first_own(*pool_, t)));
        return starts;
    };
    for (auto op = operations_.rbegin(); op != operations_.rend(); ++op) {
        if (auto* product = std::get_if<Linear>(&*op)) {
            product->after = after;
            after = starts_of(LinearWork(product->matrices, linear_unit(*product), *pool_));
        } else if (auto* gated = std::get_if<GatedLinear>(&*op)) {
            gated->after = after;
            after.clear();
            for (int t = 0; t < threads; ++t)
                after.push_back(gated->gate->panels() + pool_->first_own_chunk(gated->pieces(), t) *
                                                            gated->chunk * gated->gate->panel_bytes());
        } else if (std::holds_alternative<Logits>(*op)) {
            after = starts_of(LinearWork({head_}, kHeadUnit, *pool_));
        }
    }
}

void Program::logits(int in, std::vector<float> norm_weight, float eps, std::shared_ptr<Matrix> head) {
    if (static_cast<int>(norm_weight.size()) != widths_.at(in) || head->in_features() != widths_[in])
        refuse("a head over " + text(head->in_features()) + " with a norm of " + text(norm_weight.size()) +
               " does not fit a buffer of " + text(widths_[in]));
    head_ = std::move(head);
    head_rows_ =
        static_cast<int>(std::clamp<int64_t>(kLogitsBytes / (4 * head_->out_features()) / 4 * 4, 8, 64));
    head_rows_ = std::min(head_rows_, row_tile_);
    head_input_.reset(new float[static_cast<size_t>(head_rows_) * widths_[in]]);
    logits_.reset(new float[head_rows_ * head_->out_features()]);
    maxima_.reset(new float[head_rows_ * num_logit_blocks()]);
    activations_[0].reserve(row_tile_, widths_[in], head_->activation_codes());
    reads_rows(in);
    operations_.push_back(Logits{in, std::move(norm_weight), eps});
}

void Program::rope(std::vector<double> inverse_frequencies, double magnitude) {
    if (static_cast<int>(inverse_frequencies.size()) * 2 > head_dim_)
        refuse("rope over " + text(2 * inverse_frequencies.size()) + " dimensions does not fit heads of " +
               text(head_dim_));
    inverse_frequencies_ = std::move(inverse_frequencies);
    rope_magnitude_ = magnitude;
    rope_cos_.reset(new float[row_tile_ * inverse_frequencies_.size()]);
    rope_sin_.reset(new float[row_tile_ * inverse_frequencies_.size()]);
}

void Program::bind(uint8_t* arena, int64_t extent_bytes, int64_t num_blocks, int block_size, KVType kv_type) {
    check_block_size(block_size);
    const int64_t needed = 2 * num_layers_ * num_kv_heads_ * kv_head_bytes(kv_type, head_dim_, block_size);
    if (extent_bytes < needed)
        refuse("extents of " + text(extent_bytes) + " bytes do not hold blocks of " + text(needed));
    arena_ = arena;
    extent_bytes_ = extent_bytes;
    num_blocks_ = num_blocks;
    block_size_ = block_size;
    kv_type_ = kv_type;
    kv_rows_read_ = kv_rows_attended_ = 0;
    link_weights();
}

int64_t Program::buffer_bytes() const {
    int64_t bytes = activations_[0].nbytes() + activations_[1].nbytes();
    for (int width : widths_) bytes += int64_t{4} * row_tile_ * width;
    for (const auto& work : attention_) bytes += work->nbytes();
    if (head_) bytes += 4 * head_rows_ * (head_->out_features() + num_logit_blocks() + head_->in_features());
    bytes += static_cast<int64_t>(gated_scratch_.size() * gated_scratch_floats_ * sizeof(float));
    return bytes + int64_t{8} * row_tile_ * static_cast<int64_t>(inverse_frequencies_.size());
}

PagedKV Program::paged_kv(int layer) const {
    const int64_t layer_bytes = 2 * num_kv_heads_ * kv_head_bytes(kv_type_, head_dim_, block_size_);
    return {arena_, extent_bytes_, layer * layer_bytes, num_kv_heads_, head_dim_, block_size_, kv_type_};
}

void Program::validate(const Batch& batch) const {
    if (arena_ == nullptr) refuse("no arena is bound");
    if (!head_ || vocab_rows_ == 0) refuse("the program has no embedding or no logits");
    int64_t tokens = 0;
    if (batch.table_offsets[0] != 0 || batch.table_offsets[batch.num_seqs] != batch.num_table_entries)
        refuse("block table offsets span " + text(batch.table_offsets[batch.num_seqs]) + " entries of " +
               text(batch.num_table_entries));
    for (int64_t s = 0; s < batch.num_seqs; ++s) {
        const int64_t start = batch.chunk_starts[s], count = batch.chunk_lens[s];
        if (start < 0 || count < 1)
            refuse("chunk " + text(s) + " has " + text(count) + " tokens from " + text(start));
        const int64_t entries = int64_t{batch.table_offsets[s + 1]} - batch.table_offsets[s];
        if (entries * block_size_ < start + count)
            refuse("chunk " + text(s) + " ends at position " + text(start + count) + " but its " +
                   text(entries) + " blocks hold " + text(std::max<int64_t>(entries, 0) * block_size_));
        tokens += count;
    }
    if (tokens != batch.num_tokens)
        refuse("the chunks have " + text(tokens) + " tokens, the batch " + text(batch.num_tokens));
    for (int64_t i = 0; i < batch.num_table_entries; ++i)
        if (batch.block_tables[i] < 0 || batch.block_tables[i] >= num_blocks_)
            refuse("block " + text(batch.block_tables[i]) + " is outside the pool of " + text(num_blocks_));
    for (int64_t i = 0; i < batch.num_tokens; ++i)
        if (batch.token_ids[i] < 0 || batch.token_ids[i] >= vocab_rows_)
            refuse("token " + text(batch.token_ids[i]) + " is outside the vocabulary of " +
                   text(vocab_rows_));
}

void Program::prepare_tile(const Batch& batch, int64_t first_token, const std::vector<Sampler*>& samplers,
                           bool all) {
    Tile& tile = tile_;
    tile.rows = static_cast<int>(std::min<int64_t>(row_tile_, batch.num_tokens - first_token));
    tile.token_ids = batch.token_ids + first_token;
    tile.segments.clear();
    tile.positions.clear();
    tile.blocks.clear();
    tile.slots.clear();
    tile.logit_rows.clear();
    tile.logit_targets.clear();
    int64_t chunk_begin = 0;
    for (int64_t s = 0; s < batch.num_seqs; ++s) {
        const int64_t chunk_end = chunk_begin + batch.chunk_lens[s];
        const int64_t begin = std::max(chunk_begin, first_token);
        const int64_t end = std::min(chunk_end, first_token + tile.rows);
        if (begin < end) {
            const int32_t* table = batch.block_tables + batch.table_offsets[s];
            const int first_position = static_cast<int>(batch.chunk_starts[s] + begin - chunk_begin);
            tile.segments.push_back({static_cast<int>(begin - first_token), static_cast<int>(end - begin),
                                     first_position, table});
            for (int64_t i = begin; i < end; ++i) {
                const int position = first_position + static_cast<int>(i - begin);
                tile.positions.push_back(position);
                tile.blocks.push_back(table[position / block_size_]);
                tile.slots.push_back(position % block_size_);
                if (all || (i + 1 == chunk_end && samplers[s] != nullptr)) {
                    tile.logit_rows.push_back(static_cast<int>(i - first_token));
                    tile.logit_targets.push_back(all ? i : s);
                }
            }
        }
        chunk_begin = chunk_end;
    }
    for (const auto& work : attention_) work->plan(tile.segments, block_size_, share_prefixes_);
}

int64_t Program::rows_at_once(int rows) const { return std::max(1, rows / (4 * pool_->num_threads())); }

void Program::run_operation(const Operation& operation) {
    ThreadPool& pool = *pool_;
    const int rows = tile_.rows;
    // One row after another: on this thread where that is done before another one has heard of it.
    const auto each_row = [&](int width, auto&& body) {
        const int64_t chunk = rows * width <= kAloneFloats ? rows : rows_at_once(rows);
        pool.parallel_for(rows, chunk, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) body(static_cast<int>(i));
        });
    };
    if (const auto* op = std::get_if<Embed>(&operation)) {
        const int half = static_cast<int>(inverse_frequencies_.size());
        each_row(widths_[op->out], [&](int i) {
            op->table->dequantize_row(tile_.token_ids[i], row(op->out, i));
            for (int d = 0; d < half; ++d) {
                const double angle = tile_.positions[i] * inverse_frequencies_[d];
                rope_cos_[i * half + d] = static_cast<float>(std::cos(angle) * rope_magnitude_);
                rope_sin_[i * half + d] = static_cast<float>(std::sin(angle) * rope_magnitude_);
            }
        });
    } else if (const auto* op = std::get_if<RmsNorm>(&operation)) {
        const int width = widths_[op->out];
        each_row(width, [&](int i) {
            kernels_.rms_norm_row(row(op->in, i), op->weight.data(), width, op->eps, row(op->out, i));
            activations_[0].quantize(kernels_, i, width, 0, width, row(op->out, i), op->codes);
        });
    } else if (const auto* op = std::get_if<Quantize>(&operation)) {
        const int width = widths_[op->in];
        each_row(width, [&](int i) {
            activations_[0].quantize(kernels_, i, width, 0, width, row(op->in, i), op->codes);
        });
    } else if (const auto* op = std::get_if<Linear>(&operation)) {
        const Activations activations = activations_[op->slot].view(row(op->in, 0), widths_[op->in]);
        if (op->rope_layer < 0) {
            octavo::linear(kernels_, pool, op->matrices, activations, rows, row(op->out, 0), widths_[op->out],
                           op->accumulate, linear_unit(*op), nullptr, op->after);
        } else {
            octavo::linear(
                kernels_, pool, op->matrices, activations, rows, row(op->out, 0), widths_[op->out], false,
                linear_unit(*op),
                [&](int64_t begin, int64_t end) { rope_and_store(op->out, op->rope_layer, begin, end); },
                op->after);
        }
    } else if (const auto* op = std::get_if<RopeAndStore>(&operation)) {
        const int width = widths_[op->qkv];
        const int64_t heads = width / head_dim_;
        pool.parallel_for(heads, rows * width <= kAloneFloats ? heads : 1,
                          [&](int64_t begin, int64_t end, int) {
                              rope_and_store(op->qkv, op->layer, begin * head_dim_, end * head_dim_);
                          });
    } else if (const auto* op = std::get_if<Attend>(&operation)) {
        const int slice = num_heads_ / num_kv_heads_ * head_dim_, width = widths_[op->out];
        const auto quantize = [&](int i, int kv_head) {
            activations_[0].quantize(kernels_, i, width, kv_head * slice, slice,
                                     row(op->out, i) + kv_head * slice, op->codes);
        };
        AttentionWork& work = *attention_[op->work];
        work.run(kernels_, pool, paged_kv(op->layer), op->soft_cap, row(op->qkv, 0), widths_[op->qkv],
                 row(op->out, 0), width, op->codes == kNoCodes ? AttentionWork::Then() : quantize);
        kv_rows_read_ += work.kv_rows_read();
        kv_rows_attended_ += work.kv_rows_attended();
    } else if (const auto* op = std::get_if<GatedLinear>(&operation)) {
        run_gated_linear(*op);
    } else if (const auto* op = std::get_if<Logits>(&operation)) {
        run_logits(*op);
    }
}

// The heads in columns [begin, end) of all rows of q, k and v.
void Program::rope_and_store(int qkv, int layer, int64_t begin, int64_t end) {
    const int half = static_cast<int>(inverse_frequencies_.size());
    const PagedKV kv = paged_kv(layer);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    for (int i = 0; i < tile_.rows; ++i) {
        const float* cos = rope_cos_.get() + i * half;
        const float* sin = rope_sin_.get() + i * half;
        for (int head = static_cast<int>(begin / head_dim_); head < end / head_dim_; ++head) {
            float* x = row(qkv, i) + head * head_dim_;
            const int kv_head = (head - num_heads_) % num_kv_heads_;
            if (head < num_heads_) {
                kernels_.rope_head(x, head_dim_, 2 * half, cos, sin, scale);
                if (kv.type == KVType::kQ8) kernels_.rotate_query(x, head_dim_);
            } else if (head < num_heads_ + num_kv_heads_) {
                kernels_.rope_head(x, head_dim_, 2 * half, cos, sin, 1.0f);
                kernels_.store_key(kv, tile_.blocks[i], tile_.slots[i], kv_head, x);
            } else {
                kernels_.store_value(kv, tile_.blocks[i], tile_.slots[i], kv_head, x);
            }
        }
    }
}

// Some panels of the gate, the same panels of up, and then, while both are in cache, what becomes of them:
// whole groups of activations. Rows come in blocks, or their sums would not stay there.
void Program::run_gated_linear(const GatedLinear& op) {
    const int width = widths_[op.out];
    const Activations activations = activations_[op.slot].view(row(op.in, 0), widths_[op.in]);
    ActivationBuffer& codes_out = activations_[1 - op.slot];
    // A pool of one thread gets all panels at once, which are too many for the scratch.
    const int64_t panels = op.gate->num_panels(), pieces = op.pieces();
    pool_->parallel_for(pieces, 1, [&](int64_t first_piece, int64_t last_piece, int thread) {
        const int64_t end_of_own = pool_->first_own_chunk(pieces, thread + 1);
        float* gate = gated_scratch_[thread].get();
        float* up = gate + kGatedRows * op.chunk * kPanelColumns;
        for (int64_t piece = first_piece; piece < last_piece; ++piece) {
            const int64_t begin = piece * op.chunk, end = std::min(begin + op.chunk, panels);
            const int column = static_cast<int>(begin * kPanelColumns);
            const int count =
                static_cast<int>(std::min(end * kPanelColumns, op.gate->out_features())) - column;
            for (int first = 0; first < tile_.rows; first += kGatedRows) {
                const int rows = std::min(kGatedRows, tile_.rows - first);
                const uint8_t* next = nullptr;
                const bool last_rows = first + rows == tile_.rows;
                if (last_rows && piece + 1 < end_of_own)
                    next = op.gate->panels() + end * op.gate->panel_bytes();
                else if (last_rows && piece + 1 == end_of_own && !op.after.empty())
                    next = op.after[thread];
                const auto multiply = [&](const Matrix& matrix, float* out, const uint8_t* follows) {
                    MatmulTask task =
                        matmul_task(matrix, rows_from(activations, first, widths_[op.in]), rows);
                    task.panels += begin * task.panel_bytes;
                    task.follows = follows;
                    task.columns = count;
                    task.panel_end = end - begin;
                    task.out = out;
                    task.out_stride = count;
                    kernels_.matmul[static_cast<int>(matrix.type())](task);
                };
                multiply(*op.gate, gate, op.up->panels() + begin * op.up->panel_bytes());
                multiply(*op.up, up, next);
                for (int i = 0; i < rows; ++i) {
                    float* hidden = op.writes_rows ? row(op.out, first + i) + column : gate + i * count;
                    kernels_.silu_mul_row(gate + i * count, up + i * count, count, hidden);
                    codes_out.quantize(kernels_, first + i, width, column, count, hidden, op.codes);
                }
            }
        }
    });
}

void Program::run_logits(const Logits& op) {
    ThreadPool& pool = *pool_;
    const int width = widths_[op.in];
    const int64_t vocab = head_->out_features(), blocks = num_logit_blocks();
    const int total = static_cast<int>(tile_.logit_rows.size());
    for (int first = 0; first < total; first += head_rows_) {
        const int rows = std::min(head_rows_, total - first);
        pool.parallel_for(rows, rows_at_once(rows), [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                float* normed = head_input_.get() + i * width;
                kernels_.rms_norm_row(row(op.in, tile_.logit_rows[first + i]), op.weight.data(), width,
                                      op.eps, normed);
                activations_[0].quantize(kernels_, static_cast<int>(i), width, 0, width, normed,
                                         head_->activation_codes());
            }
        });
        // Two panels are a block of logits, whose maxima are taken while they are in cache.
        static_assert(kLogitBlock == kHeadUnit * kPanelColumns);
        octavo::linear(
            kernels_, pool, {head_}, activations_[0].view(head_input_.get(), width), rows, logits_.get(),
            static_cast<int>(vocab), false, kHeadUnit, [&](int64_t begin, int64_t end) {
                for (int i = 0; i < rows; ++i)
                    block_maxima(logits_.get() + i * vocab + begin, static_cast<size_t>(end - begin),
                                 maxima_.get() + i * blocks + begin / static_cast<int64_t>(kLogitBlock));
            });
        pool.parallel_for(rows, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                float* logits = logits_.get() + i * vocab;
                const int64_t target = tile_.logit_targets[first + i];
                if (all_logits_ != nullptr)
                    std::memcpy(all_logits_ + target * vocab, logits, vocab * sizeof(float));
                else
                    (*sampled_)[target] = (*samplers_)[target]->sample(logits, maxima_.get() + i * blocks);
            }
        });
    }
}

void Program::run(const Batch& batch, const std::vector<Sampler*>& samplers, std::vector<Sampled>& sampled,
                  float* all_logits) {
    validate(batch);
    if (static_cast<int64_t>(samplers.size()) != batch.num_seqs)
        refuse(text(samplers.size()) + " samplers for " + text(batch.num_seqs) + " sequences");
    for (const Sampler* sampler : samplers)
        if (sampler != nullptr && sampler->vocab_size() != vocab_size())
            refuse("a sampler for a vocabulary of " + text(sampler->vocab_size()) + " meets logits of " +
                   text(vocab_size()));
    samplers_ = &samplers;
    sampled_ = &sampled;
    all_logits_ = all_logits;
    sampled.assign(samplers.size(), Sampled{});
    ThreadPool::Session session(*pool_);
    for (int64_t first = 0; first < batch.num_tokens; first += row_tile_) {
        prepare_tile(batch, first, samplers, all_logits != nullptr);
        for (const Operation& operation : operations_) run_operation(operation);
    }
}

}  // namespace octavo
