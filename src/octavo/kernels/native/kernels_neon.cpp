// The kernels compiled for AArch64 with dot products (Armv8.2-A FEAT_DotProd).
#include <type_traits>

#include "kernel_table.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

namespace octavo {

// Internal linkage throughout: a function with external linkage compiled here could replace its twin in
// another file.
namespace {

constexpr char kName[] = "neon";

#include "float_formats.h"
#include "weight_layout.h"
#include "simd_neon.h"
#include "products_neon.h"
#include "kernels.h"

}  // namespace

const KernelTable* neon_kernels() { return &kTable; }

}  // namespace octavo

#else

namespace octavo {
const KernelTable* neon_kernels() { return nullptr; }
}  // namespace octavo

#endif
