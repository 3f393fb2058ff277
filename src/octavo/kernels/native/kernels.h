// All kernels of one path, and their table. Included inside an anonymous namespace, after the path's simd and
// products headers; kName is the path's name.

#include "lanes.h"
#include "kernels_rows.h"
#include "kernels_matmul.h"
#include "attention_tiles.h"
#include "kernels_attention.h"

const KernelTable kTable = {
    kName,
    quantize_row8,
    quantize_row16,
    rms_norm_row,
    silu_mul_row,
    rope_head,
    store_key,
    store_value,
    rotate_query,
    attention,
    fold_states,
    {
        float_matmul<float>,
        float_matmul<Half>,
        float_matmul<BFloat>,
        quantized_matmul<WeightType::kQ4_0>,
        quantized_matmul<WeightType::kQ4_1>,
        quantized_matmul<WeightType::kQ5_0>,
        quantized_matmul<WeightType::kQ5_1>,
        quantized_matmul<WeightType::kQ8_0>,
        quantized_matmul<WeightType::kQ2_K>,
        quantized_matmul<WeightType::kQ3_K>,
        quantized_matmul<WeightType::kQ4_K>,
        quantized_matmul<WeightType::kQ5_K>,
        quantized_matmul<WeightType::kQ6_K>,
        quantized_matmul<WeightType::kIQ4_NL>,
        quantized_matmul<WeightType::kIQ4_XS>,
    },
    peak_fma,
    peak_int8,
    peak_int8_summed,
    read_bytes,
};
