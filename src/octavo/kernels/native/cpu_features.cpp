#include "cpu_features.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace octavo {

namespace {

struct Path {
    const char* name;
    const KernelTable* kernels;
    bool runs_here;
};

// Best first.
std::vector<Path> paths() {
    bool avx2 = false, avxvnni = false, avx512vnni = false, sse41 = false, neon = false;
#if defined(__x86_64__)
    unsigned eax, ebx, ecx, edx;
    sse41 = __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
    // __builtin_cpu_supports also asks whether the operating system saves the wide registers.
    avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ((ecx >> 29) & 1);  // F16C
    avxvnni = avx2 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && ((eax >> 4) & 1);
#if defined(OCTAVO_AVXVNNI_AS_AVX512)
    avxvnni = avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#endif
    avx512vnni = avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    neon = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;  // sdot
#endif
    std::vector<Path> all = {{"avx512vnni", avx512vnni_kernels(), avx512vnni},
                             {"avxvnni", avxvnni_kernels(), avxvnni},
                             {"avx2", avx2_kernels(), avx2},
                             {"sse41", sse41_kernels(), sse41},
                             {"neon", neon_kernels(), neon},
                             {"portable", &portable_kernels(), true}};
    std::erase_if(all, [](const Path& path) { return path.kernels == nullptr || !path.runs_here; });
    return all;
}

}  // namespace

std::vector<std::string> available_instruction_sets() {
    std::vector<std::string> names;
    for (const Path& path : paths()) names.emplace_back(path.name);
    return names;
}

const KernelTable& select_kernels(const std::string& instruction_set) {
    std::string listed;
    for (const Path& path : paths()) {
        if (instruction_set.empty() || instruction_set == path.name) return *path.kernels;
        listed += (listed.empty() ? "" : ", ") + std::string(path.name);
    }
    throw std::invalid_argument("instruction set '" + instruction_set +
                                "' cannot run on this processor; available: " + listed);
}

}  // namespace octavo
