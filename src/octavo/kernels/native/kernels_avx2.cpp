// The kernels compiled for AVX2 + FMA + F16C.
#include <type_traits>

#include "kernel_table.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace octavo {

// Internal linkage throughout: a function with external linkage compiled here could replace its twin in
// another file.
namespace {

constexpr char kName[] = "avx2";

#include "float_formats.h"
#include "weight_layout.h"
#include "simd_avx2.h"
#include "products_avx2.h"
#include "kernels.h"

}  // namespace

const KernelTable* avx2_kernels() { return &kTable; }

}  // namespace octavo

#else

namespace octavo {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace octavo

#endif
