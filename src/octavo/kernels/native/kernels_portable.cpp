// The kernels compiled for any processor: the oracle of the other paths.
#include "kernel_table.h"

namespace octavo {

// Internal linkage throughout: a function with external linkage compiled here could replace its twin in
// another file.
namespace {

#include "float_formats.h"
#include "simd_portable.h"
#include "kernels_rows.h"
#include "kernels_matmul.h"
#include "kernels_attention.h"

const KernelTable kTable = {
    "portable",
    quantize_row8,
    quantize_row16,
    rms_norm_row,
    silu_mul_row,
    rope_row,
    store_kv,
    attention,
    fold_states,
    {
        float_matmul<float>,
        float_matmul<Half>,
        float_matmul<BFloat>,
        quantized_matmul<WeightType::kQ4_0>,
        quantized_matmul<WeightType::kQ4_1>,
        quantized_matmul<WeightType::kQ8_0>,
    },
    peak_fma,
    peak_int8,
    read_bytes,
};

}  // namespace

const KernelTable& portable_kernels() { return kTable; }

int attention_scratch_floats(int head_dim) {
    return kMaxQueryVectors * kRunTokens + 2 * kMaxQueryVectors * head_dim + kSliceTokens * head_dim;
}

}  // namespace octavo
