#include "cpu_features.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace octavo {

namespace {

bool has_avx2_fma_f16c() {
#if defined(__x86_64__)
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
    const bool f16c = (ecx >> 29) & 1;
    // __builtin_cpu_supports also asks whether the operating system saves the wide registers.
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

}  // namespace

std::vector<std::string> available_instruction_sets() {
    std::vector<std::string> names;
    if (avx2_kernels() != nullptr && has_avx2_fma_f16c()) names.emplace_back("avx2");
    names.emplace_back("portable");
    return names;
}

const KernelTable& select_kernels(const std::string& instruction_set) {
    const std::vector<std::string> names = available_instruction_sets();
    const std::string& wanted = instruction_set.empty() ? names.front() : instruction_set;
    std::string listed;
    for (const std::string& name : names) {
        if (name == wanted) return name == "avx2" ? *avx2_kernels() : portable_kernels();
        listed += (listed.empty() ? "" : ", ") + name;
    }
    throw std::invalid_argument("instruction set '" + wanted +
                                "' cannot run on this processor; available: " + listed);
}

}  // namespace octavo
