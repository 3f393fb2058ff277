// The kernels compiled for any processor: the oracle of the other paths.
#include <type_traits>

#include "kernel_table.h"

namespace octavo {

// Internal linkage throughout: a function with external linkage compiled here could replace its twin in
// another file.
namespace {

constexpr char kName[] = "portable";

#include "float_formats.h"
#include "weight_layout.h"
#include "simd_portable.h"
#include "products_portable.h"
#include "kernels.h"

}  // namespace

const KernelTable& portable_kernels() { return kTable; }

}  // namespace octavo
