// The kernels compiled for SSE4.1 + SSSE3: x86 without AVX, such as the J4125 and the N5105.
#include <type_traits>

#include "kernel_table.h"

#if defined(__SSE4_1__) && defined(__SSSE3__)
#include <smmintrin.h>
#include <tmmintrin.h>

namespace octavo {

// Internal linkage throughout: a function with external linkage compiled here could replace its twin in
// another file.
namespace {

constexpr char kName[] = "sse41";

#include "float_formats.h"
#include "weight_layout.h"
#include "simd_sse41.h"
#include "products_sse41.h"
#include "kernels.h"

}  // namespace

const KernelTable* sse41_kernels() { return &kTable; }

}  // namespace octavo

#else

namespace octavo {
const KernelTable* sse41_kernels() { return nullptr; }
}  // namespace octavo

#endif
