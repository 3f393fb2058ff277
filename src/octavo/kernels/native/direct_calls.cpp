#include "direct_calls.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "attention_work.h"
#include "cpu_features.h"
#include "program.h"

namespace nb = nanobind;

namespace octavo {

namespace {

using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatHeads = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewFloats = nb::ndarray<nb::numpy, float>;

NewFloats new_floats(std::vector<size_t> shape) {
    size_t count = 1;
    for (size_t n : shape) count *= n;
    float* data = new float[count];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return NewFloats(data, shape.size(), shape.data(), owner);
}

// Seconds of each of `repeats` calls.
template <class Body>
std::vector<double> timed(int repeats, Body&& body) {
    std::vector<double> seconds;
    for (int i = 0; i < repeats; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        body();
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return seconds;
}

class MatmulCall {
  public:
    MatmulCall(ThreadPool& pool, const std::string& instruction_set, std::shared_ptr<Matrix> matrix,
               FloatRows x, float* out)
        : pool_(pool),
          kernels_(select_kernels(instruction_set)),
          matrices_{std::move(matrix)},
          x_(x.data()),
          rows_(static_cast<int>(x.shape(0))),
          k_(static_cast<int>(x.shape(1))),
          out_(out) {
        if (k_ != matrices_[0]->in_features())
            throw std::invalid_argument("rows of " + std::to_string(k_) + " do not fit a matrix over " +
                                        std::to_string(matrices_[0]->in_features()));
        activations_.reserve(rows_, k_, matrices_[0]->activation_codes());
    }

    void operator()() {
        ThreadPool::Session session(pool_);
        const int codes = matrices_[0]->activation_codes();
        if (codes != kNoCodes)
            pool_.parallel_for(rows_, 4, [&](int64_t begin, int64_t end, int) {
                for (int64_t i = begin; i < end; ++i)
                    activations_.quantize(kernels_, static_cast<int>(i), k_, 0, k_, x_ + i * k_, codes);
            });
        linear(kernels_, pool_, matrices_, activations_.view(x_, k_), rows_, out_,
               static_cast<int>(matrices_[0]->out_features()), false);
    }

  private:
    ThreadPool& pool_;
    const KernelTable& kernels_;
    std::vector<std::shared_ptr<Matrix>> matrices_;
    const float* x_;
    int rows_, k_;
    float* out_;
    ActivationBuffer activations_;
};

class AttentionCall {
  public:
    AttentionCall(ThreadPool& pool, Bytes arena, int64_t extent_bytes, int64_t layer_offset, int block_size,
                  int num_kv_heads, FloatHeads q, Ints chunk_starts, Ints chunk_lens, Ints table_offsets,
                  Ints block_tables, const std::string& instruction_set, const std::string& kv_dtype,
                  int window, float soft_cap, bool share_prefixes, float* out)
        : pool_(pool),
          kernels_(select_kernels(instruction_set)),
          kv_{arena.data(), extent_bytes,           layer_offset, num_kv_heads, static_cast<int>(q.shape(2)),
              block_size,   kv_type_named(kv_dtype)},
          soft_cap_(soft_cap),
          q_(q.data(), q.data() + q.size()),
          width_(static_cast<int>(q.shape(1) * q.shape(2))),
          out_(out),
          work_(pool.num_threads(), static_cast<int>(q.shape(0)), static_cast<int>(q.shape(1)), num_kv_heads,
                static_cast<int>(q.shape(2)), window) {
        check_block_size(block_size);
        check_soft_cap(soft_cap);
        const int64_t layer_bytes = 2 * num_kv_heads * kv_head_bytes(kv_.type, kv_.head_dim, block_size);
        if (layer_offset < 0 || layer_offset > extent_bytes - layer_bytes)
            throw std::invalid_argument("a layer of " + std::to_string(layer_bytes) + " bytes at " +
                                        std::to_string(layer_offset) + " reaches out of extents of " +
                                        std::to_string(extent_bytes));
        const size_t chunks = chunk_starts.shape(0);
        if (chunk_lens.shape(0) != chunks || table_offsets.shape(0) != chunks + 1)
            throw std::invalid_argument(std::to_string(chunks) + " starts do not go with " +
                                        std::to_string(chunk_lens.shape(0)) + " lengths and " +
                                        std::to_string(table_offsets.shape(0)) + " table offsets");
        std::vector<Segment> segments;
        int64_t row = 0;
        for (size_t s = 0; s < chunks; ++s) {
            const int64_t start = chunk_starts.data()[s], count = chunk_lens.data()[s];
            const int64_t from = table_offsets.data()[s], to = table_offsets.data()[s + 1];
            if (start < 0 || count < 1 || from < 0 || to > static_cast<int64_t>(block_tables.shape(0)) ||
                (to - from) * block_size < start + count)
                throw std::invalid_argument("chunk " + std::to_string(s) + " of " + std::to_string(count) +
                                            " tokens from " + std::to_string(start) +
                                            " does not fit table entries " + std::to_string(from) + " to " +
                                            std::to_string(to));
            segments.push_back({static_cast<int>(row), static_cast<int>(count), static_cast<int>(start),
                                block_tables.data() + from});
            row += count;
        }
        for (size_t i = 0; i < block_tables.shape(0); ++i)
            if (block_tables.data()[i] < 0 ||
                (block_tables.data()[i] + int64_t{1}) * extent_bytes > static_cast<int64_t>(arena.shape(0)))
                throw std::invalid_argument("block " + std::to_string(block_tables.data()[i]) +
                                            " is outside the arena");
        if (row != static_cast<int64_t>(q.shape(0)))
            throw std::invalid_argument("the chunks have " + std::to_string(row) + " tokens, the queries " +
                                        std::to_string(q.shape(0)));
        if (kv_.type == KVType::kQ8)
            for (size_t at = 0; at < q_.size(); at += static_cast<size_t>(kv_.head_dim))
                kernels_.rotate_query(q_.data() + at, kv_.head_dim);
        work_.plan(segments, block_size, share_prefixes);
    }

    void operator()() {
        ThreadPool::Session session(pool_);
        work_.run(kernels_, pool_, kv_, soft_cap_, q_.data(), width_, out_, width_);
    }

  private:
    ThreadPool& pool_;
    const KernelTable& kernels_;
    PagedKV kv_;
    float soft_cap_;
    std::vector<float> q_;
    int width_;
    float* out_;
    AttentionWork work_;
};

// Peaks are of all threads together: operations a second.
double peak(ThreadPool& pool, const std::string& instruction_set, double (*KernelTable::*loop)(int64_t),
            int64_t iterations) {
    const KernelTable& kernels = select_kernels(instruction_set);
    std::atomic<double> operations{0.0};
    ThreadPool::Session session(pool);
    // Many pieces, so that a thread that begins late does not count as a slow machine.
    const int64_t pieces = int64_t{64} * pool.num_threads();
    const int64_t each = std::max<int64_t>(1, iterations / 64);
    const std::vector<double> seconds = timed(1, [&] {
        pool.parallel_for(pieces, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) operations.fetch_add((kernels.*loop)(each));
        });
    });
    return operations / seconds[0];
}

}  // namespace

void bind_direct_calls(nb::module_& m) {
    m.def("available_instruction_sets", &available_instruction_sets, "Paths that can run here, best first.");
    m.def(
        "matmul",
        [](ThreadPool& pool, std::shared_ptr<Matrix> matrix, FloatRows x,
           const std::string& instruction_set) {
            NewFloats out = new_floats({x.shape(0), static_cast<size_t>(matrix->out_features())});
            MatmulCall call(pool, instruction_set, matrix, x, out.data());
            nb::gil_scoped_release release;
            call();
            return out;
        },
        nb::arg("pool"), nb::arg("matrix"), nb::arg("x"), nb::arg("instruction_set") = "",
        "x float32[rows, in] times the matrix: float32[rows, out]. Raises ValueError for sizes that "
        "disagree.");
    m.def(
        "time_matmul",
        [](ThreadPool& pool, std::shared_ptr<Matrix> matrix, FloatRows x, int repeats,
           const std::string& instruction_set) {
            std::vector<float> out(x.shape(0) * static_cast<size_t>(matrix->out_features()));
            MatmulCall call(pool, instruction_set, matrix, x, out.data());
            nb::gil_scoped_release release;
            return timed(repeats, call);
        },
        nb::arg("pool"), nb::arg("matrix"), nb::arg("x"), nb::arg("repeats"), nb::arg("instruction_set") = "",
        "Seconds of each of `repeats` products.");
    m.def(
        "paged_attention",
        [](ThreadPool& pool, Bytes arena, int64_t extent_bytes, int64_t layer_offset, int block_size,
           int num_kv_heads, FloatHeads q, Ints chunk_starts, Ints chunk_lens, Ints table_offsets,
           Ints block_tables, const std::string& instruction_set, const std::string& kv_dtype, int window,
           float soft_cap, bool share_prefixes) {
            NewFloats out = new_floats({q.shape(0), q.shape(1), q.shape(2)});
            AttentionCall call(pool, arena, extent_bytes, layer_offset, block_size, num_kv_heads, q,
                               chunk_starts, chunk_lens, table_offsets, block_tables, instruction_set,
                               kv_dtype, window, soft_cap, share_prefixes, out.data());
            nb::gil_scoped_release release;
            call();
            return out;
        },
        nb::arg("pool"), nb::arg("arena"), nb::arg("extent_bytes"), nb::arg("layer_offset"),
        nb::arg("block_size"), nb::arg("num_kv_heads"), nb::arg("q"), nb::arg("chunk_starts"),
        nb::arg("chunk_lens"), nb::arg("table_offsets"), nb::arg("block_tables"),
        nb::arg("instruction_set") = "", nb::arg("kv_dtype") = "f16", nb::arg("window") = 0,
        nb::arg("soft_cap") = 0.0f, nb::arg("share_prefixes") = true,
        "q float32[num_tokens, num_heads, head_dim], scaled, over paged KV: float32 of the same shape.");
    m.def(
        "time_paged_attention",
        [](ThreadPool& pool, Bytes arena, int64_t extent_bytes, int64_t layer_offset, int block_size,
           int num_kv_heads, FloatHeads q, Ints chunk_starts, Ints chunk_lens, Ints table_offsets,
           Ints block_tables, int repeats, const std::string& instruction_set, const std::string& kv_dtype,
           int window, float soft_cap, bool share_prefixes) {
            std::vector<float> out(q.size());
            AttentionCall call(pool, arena, extent_bytes, layer_offset, block_size, num_kv_heads, q,
                               chunk_starts, chunk_lens, table_offsets, block_tables, instruction_set,
                               kv_dtype, window, soft_cap, share_prefixes, out.data());
            nb::gil_scoped_release release;
            return timed(repeats, call);
        },
        nb::arg("pool"), nb::arg("arena"), nb::arg("extent_bytes"), nb::arg("layer_offset"),
        nb::arg("block_size"), nb::arg("num_kv_heads"), nb::arg("q"), nb::arg("chunk_starts"),
        nb::arg("chunk_lens"), nb::arg("table_offsets"), nb::arg("block_tables"), nb::arg("repeats"),
        nb::arg("instruction_set") = "", nb::arg("kv_dtype") = "f16", nb::arg("window") = 0,
        nb::arg("soft_cap") = 0.0f, nb::arg("share_prefixes") = true,
        "Seconds of each of `repeats` calls of paged_attention.");
    m.def(
        "peak_fma",
        [](ThreadPool& pool, int64_t iterations, const std::string& instruction_set) {
            nb::gil_scoped_release release;
            return peak(pool, instruction_set, &KernelTable::peak_fma, iterations);
        },
        nb::arg("pool"), nb::arg("iterations"), nb::arg("instruction_set") = "",
        "float32 operations a second of independent multiply-adds in registers, all threads.");
    m.def(
        "peak_int8",
        [](ThreadPool& pool, int64_t iterations, const std::string& instruction_set) {
            nb::gil_scoped_release release;
            return peak(pool, instruction_set, &KernelTable::peak_int8, iterations);
        },
        nb::arg("pool"), nb::arg("iterations"), nb::arg("instruction_set") = "",
        "int8 operations a second of independent 8-bit multiply-adds in registers, all threads.");
    m.def(
        "peak_int8_summed",
        [](ThreadPool& pool, int64_t iterations, const std::string& instruction_set) {
            nb::gil_scoped_release release;
            return peak(pool, instruction_set, &KernelTable::peak_int8_summed, iterations);
        },
        nb::arg("pool"), nb::arg("iterations"), nb::arg("instruction_set") = "",
        "The same of 4-bit codes times int8, as many products as 16 bits hold added before they are "
        "widened.");
    m.def(
        "time_read",
        [](ThreadPool& pool, Bytes data, int repeats, const std::string& instruction_set) {
            const KernelTable& kernels = select_kernels(instruction_set);
            const int64_t chunk = int64_t{1} << 20;
            const int64_t bytes = static_cast<int64_t>(data.shape(0));
            std::atomic<double> sum{0.0};
            nb::gil_scoped_release release;
            ThreadPool::Session session(pool);
            return timed(repeats, [&] {
                pool.parallel_for(bytes, chunk, [&](int64_t begin, int64_t end, int) {
                    sum.fetch_add(kernels.read_bytes(data.data() + begin, end - begin),
                                  std::memory_order_relaxed);
                });
            });
        },
        nb::arg("pool"), nb::arg("data"), nb::arg("repeats"), nb::arg("instruction_set") = "",
        "Seconds of each of `repeats` reads of all of data by all threads.");
}

}  // namespace octavo
