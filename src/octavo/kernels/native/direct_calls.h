// Single kernels called by themselves, on the code that steps use: what tests compare and `octavo bench
// kernels` times.
#pragma once

namespace nanobind __attribute__((visibility("hidden"))) {
    class module_;
}

namespace octavo {

void bind_direct_calls(nanobind::module_& m);

}  // namespace octavo
