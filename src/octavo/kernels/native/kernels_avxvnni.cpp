// The kernels compiled for AVX2 + FMA + F16C + AVX-VNNI: small cores without AVX-512, such as the N100.
#include <type_traits>

#include "kernel_table.h"

// OCTAVO_AVXVNNI_AS_AVX512: the same kernels in the other encoding of their two instructions, for tests on
// processors that have only that one.
#if defined(__AVXVNNI__) || defined(OCTAVO_AVXVNNI_AS_AVX512)
#include <immintrin.h>

namespace octavo {

// Internal linkage throughout: a function with external linkage compiled here could replace its twin in
// another file.
namespace {

constexpr char kName[] = "avxvnni";

#include "float_formats.h"
#include "weight_layout.h"
#include "simd_avx2.h"
#include "products_vnni.h"
#include "kernels.h"

}  // namespace

const KernelTable* avxvnni_kernels() { return &kTable; }

}  // namespace octavo

#else

namespace octavo {
const KernelTable* avxvnni_kernels() { return nullptr; }
}  // namespace octavo

#endif
