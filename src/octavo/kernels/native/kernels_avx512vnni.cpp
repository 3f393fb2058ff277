// The kernels compiled for AVX-512 VL + VNNI: attention and products of many rows 512 bits wide, everything
// else 256.
#include <type_traits>

#include "kernel_table.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operand of its own unmasked intrinsics for a fault, where they are inlined.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#define OCTAVO_SIXTEEN_LANES

namespace octavo {

// Internal linkage throughout: a function with external linkage compiled here could replace its twin in
// another file.
namespace {

constexpr char kName[] = "avx512vnni";

#include "float_formats.h"
#include "weight_layout.h"
#include "simd_avx2.h"
#include "simd_avx512.h"
#include "products_vnni.h"
#include "products_avx512.h"
#include "kernels.h"

}  // namespace

const KernelTable* avx512vnni_kernels() { return &kTable; }

}  // namespace octavo

#else

namespace octavo {
const KernelTable* avx512vnni_kernels() { return nullptr; }
}  // namespace octavo

#endif
