// All kernels of one path, and their table. Included inside an anonymous namespace, after the path's simd and
// products headers; kName is the path's name.

#include "kernels_rows.h"
#include "kernels_matmul.h"
#include "kernels_attention.h"

const KernelTable kTable = {
    kName,
    quantize_row8,
    quantize_row16,
    rms_norm_row,
    silu_mul_row,
    rope_row,
    store_kv,
    attention,
    fold_states,
    {
        matmul<Floats<float>>,
        matmul<Floats<Half>>,
        matmul<Floats<BFloat>>,
        matmul<Quantized<WeightType::kQ4_0>>,
        matmul<Quantized<WeightType::kQ4_1>>,
        matmul<Quantized<WeightType::kQ5_0>>,
        matmul<Quantized<WeightType::kQ5_1>>,
        matmul<Quantized<WeightType::kQ8_0>>,
        matmul<Quantized<WeightType::kQ2_K>>,
        matmul<Quantized<WeightType::kQ3_K>>,
        matmul<Quantized<WeightType::kQ4_K>>,
        matmul<Quantized<WeightType::kQ5_K>>,
        matmul<Quantized<WeightType::kQ6_K>>,
        matmul<Quantized<WeightType::kIQ4_NL>>,
        matmul<Quantized<WeightType::kIQ4_XS>>,
    },
    peak_fma,
    peak_int8,
    read_bytes,
};
