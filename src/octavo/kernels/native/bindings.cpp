// The extension module octavo.kernels._native.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "direct_calls.h"
#include "program.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace octavo;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Batch make_batch(const Ints& token_ids, const Ints& chunk_starts, const Ints& chunk_lens,
                 const Ints& table_offsets, const Ints& block_tables) {
    const size_t num_seqs = chunk_starts.shape(0);
    if (chunk_lens.shape(0) != num_seqs || table_offsets.shape(0) != num_seqs + 1)
        throw std::invalid_argument("chunk_starts has " + std::to_string(num_seqs) +
                                    " sequences, chunk_lens " + std::to_string(chunk_lens.shape(0)) +
                                    ", block_table_offsets " + std::to_string(table_offsets.shape(0)) +
                                    " (one more is right)");
    return {token_ids.data(),
            static_cast<int64_t>(token_ids.shape(0)),
            chunk_starts.data(),
            chunk_lens.data(),
            static_cast<int64_t>(num_seqs),
            table_offsets.data(),
            block_tables.data(),
            static_cast<int64_t>(block_tables.shape(0))};
}

nb::list step(Program& program, const Ints& token_ids, const Ints& chunk_starts, const Ints& chunk_lens,
              const Ints& table_offsets, const Ints& block_tables, const nb::sequence& samplers) {
    const Batch batch = make_batch(token_ids, chunk_starts, chunk_lens, table_offsets, block_tables);
    std::vector<Sampler*> pointers;
    for (nb::handle item : samplers) pointers.push_back(item.is_none() ? nullptr : nb::cast<Sampler*>(item));
    std::vector<Sampled> sampled;
    {
        nb::gil_scoped_release release;
        program.run(batch, pointers, sampled, nullptr);
    }
    nb::list result;
    for (size_t i = 0; i < pointers.size(); ++i) {
        if (pointers[i] == nullptr)
            result.append(nb::none());
        else
            result.append(nb::cast(std::move(sampled[i])));
    }
    return result;
}

nb::ndarray<nb::numpy, float> all_logits(Program& program, const Ints& token_ids, const Ints& chunk_starts,
                                         const Ints& chunk_lens, const Ints& table_offsets,
                                         const Ints& block_tables) {
    const Batch batch = make_batch(token_ids, chunk_starts, chunk_lens, table_offsets, block_tables);
    const size_t shape[2] = {token_ids.shape(0), static_cast<size_t>(program.vocab_size())};
    float* data = new float[shape[0] * shape[1]];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    const std::vector<Sampler*> none(chunk_starts.shape(0), nullptr);
    std::vector<Sampled> sampled;
    {
        nb::gil_scoped_release release;
        program.run(batch, none, sampled, data);
    }
    return nb::ndarray<nb::numpy, float>(data, 2, shape, owner);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Octavo's native core: packed weights, the recorded program, paged attention, sampling.";

    nb::class_<ThreadPool>(m, "ThreadPool",
                           "Threads that sleep between steps; the calling thread counts as one.")
        .def(
            "__init__",
            [](ThreadPool* self, int num_threads) {
                if (num_threads < 1 || num_threads > 1024)
                    throw std::invalid_argument("a pool has 1 to 1,024 threads, not " +
                                                std::to_string(num_threads));
                new (self) ThreadPool(num_threads);
            },
            nb::arg("num_threads"))
        .def_prop_ro("num_threads", &ThreadPool::num_threads);

    nb::class_<WeightStore>(m, "WeightStore", "Memory for one model's packed weights.")
        .def(nb::init<int64_t>(), nb::arg("expected_bytes") = 0)
        .def_prop_ro("used_bytes", &WeightStore::used_bytes);
    m.attr("PACK_STRIP_BYTES") = kPackStripBytes;

    nb::class_<Matrix>(m, "Matrix", "A weight matrix, repacked into panels of columns at load.")
        .def(
            "__init__",
            [](Matrix* self, std::shared_ptr<WeightStore> store, const std::string& type, Bytes data,
               int64_t out_features, int64_t in_features, ThreadPool& pool,
               const Matrix::HaveRead& have_read) {
                nb::gil_scoped_release release;
                new (self) Matrix(std::move(store), type, data.data(), static_cast<int64_t>(data.shape(0)),
                                  out_features, in_features, pool, have_read);
            },
            nb::arg("store"), nb::arg("type"), nb::arg("data"), nb::arg("out_features"),
            nb::arg("in_features"), nb::arg("pool"), nb::arg("have_read").none() = nb::none(),
            "have_read(begin, end): called after each strip of at most PACK_STRIP_BYTES (or 32 rows, if "
            "those "
            "are more), in order; these bytes of data are not read again.")
        .def_prop_ro("type", [](const Matrix& self) { return weight_type_name(self.type()); })
        .def_prop_ro("out_features", &Matrix::out_features)
        .def_prop_ro("in_features", &Matrix::in_features)
        .def_prop_ro("nbytes", &Matrix::nbytes)
        .def(
            "dequantize",
            [](const Matrix& self) {
                const size_t shape[2] = {static_cast<size_t>(self.out_features()),
                                         static_cast<size_t>(self.in_features())};
                float* data = new float[shape[0] * shape[1]];
                nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
                for (size_t i = 0; i < shape[0]; ++i)
                    self.dequantize_row(static_cast<int64_t>(i), data + i * shape[1]);
                return nb::ndarray<nb::numpy, float>(data, 2, shape, owner);
            },
            "float32[out_features, in_features], equal to the reference dequantiser's values.");

    nb::class_<Program>(m, "Program", "A model recorded as a flat list of operations; a step is one call.")
        .def(nb::init<std::shared_ptr<ThreadPool>, const std::string&, int>(), nb::arg("pool"),
             nb::arg("instruction_set"), nb::arg("row_tile"))
        .def("buffer", &Program::buffer, nb::arg("width"))
        .def("embed", &Program::embed, nb::arg("table"), nb::arg("out"))
        .def(
            "rms_norm",
            [](Program& self, int x, const Floats& weight, float eps, int out) {
                self.rms_norm(x, std::vector<float>(weight.data(), weight.data() + weight.size()), eps, out);
            },
            nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"))
        .def("linear", &Program::linear, nb::arg("x"), nb::arg("matrices"), nb::arg("out"),
             nb::arg("accumulate"))
        .def("attention", &Program::attention, nb::arg("qkv"), nb::arg("out"), nb::arg("num_heads"),
             nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("window") = 0, nb::arg("soft_cap") = 0.0f)
        .def("gated_linear", &Program::gated_linear, nb::arg("x"), nb::arg("gate"), nb::arg("up"),
             nb::arg("out"))
        .def(
            "logits",
            [](Program& self, int x, const Floats& norm_weight, float eps, std::shared_ptr<Matrix> head) {
                self.logits(x,
                            std::vector<float>(norm_weight.data(), norm_weight.data() + norm_weight.size()),
                            eps, std::move(head));
            },
            nb::arg("x"), nb::arg("norm_weight"), nb::arg("eps"), nb::arg("head"))
        .def(
            "rope",
            [](Program& self, const Doubles& inverse_frequencies, double magnitude) {
                const double* data = inverse_frequencies.data();
                self.rope(std::vector<double>(data, data + inverse_frequencies.size()), magnitude);
            },
            nb::arg("inverse_frequencies"), nb::arg("magnitude"))
        .def(
            "bind",
            [](Program& self, uint64_t address, int64_t extent_bytes, int64_t num_blocks, int block_size,
               const std::string& kv_dtype) {
                self.bind(reinterpret_cast<uint8_t*>(address), extent_bytes, num_blocks, block_size,
                          kv_type_named(kv_dtype));
            },
            nb::arg("arena_address"), nb::arg("extent_bytes"), nb::arg("num_blocks"), nb::arg("block_size"),
            nb::arg("kv_dtype") = "f16")
        .def_prop_rw("shared_prefix_attention", &Program::shared_prefix_attention,
                     &Program::set_shared_prefix_attention)
        .def_prop_ro("kv_rows_read", &Program::kv_rows_read)
        .def_prop_ro("kv_rows_attended", &Program::kv_rows_attended)
        .def_prop_ro("buffer_bytes", &Program::buffer_bytes)
        .def_prop_ro("instruction_set", &Program::instruction_set)
        .def("step", &step, nb::arg("token_ids"), nb::arg("chunk_starts"), nb::arg("chunk_lens"),
             nb::arg("block_table_offsets"), nb::arg("block_tables"), nb::arg("samplers"),
             "One step. Returns a Sampled for each sequence with a sampler, else None. The GIL is released.")
        .def("logits_of_all_rows", &all_logits, nb::arg("token_ids"), nb::arg("chunk_starts"),
             nb::arg("chunk_lens"), nb::arg("block_table_offsets"), nb::arg("block_tables"),
             "float32[num_tokens, vocab_size].");

    bind_sampling(m);
    bind_direct_calls(m);
}
