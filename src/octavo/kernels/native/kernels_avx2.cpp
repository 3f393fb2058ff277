// The kernels compiled for AVX2 + FMA + F16C.
#include "kernel_table.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace octavo {

// Internal linkage throughout: a function with external linkage compiled here could replace its twin in
// another file.
namespace {

#include "float_formats.h"
#include "simd_avx2.h"
#include "kernels_rows.h"
#include "kernels_matmul.h"
#include "kernels_attention.h"

const KernelTable kTable = {
    "avx2",
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

const KernelTable* avx2_kernels() { return &kTable; }

}  // namespace octavo

#else

namespace octavo {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace octavo

#endif
