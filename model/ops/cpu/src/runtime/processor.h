// The levels of vector instructions that this processor has. CMakeLists.txt also compiles it alone, to
// build for this machine.
#pragma once

#include <vector>

namespace everstream {

// Their names, the best one first.
inline std::vector<const char*> processor_levels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v2 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    const bool v3 = v2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    const bool dot =
        v4 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (dot) return {"v4dot", "v4", "v3", "v2"};
    if (v4) return {"v4", "v3", "v2"};
    if (v3) return {"v3", "v2"};
    if (v2) return {"v2"};
    return {};
#else
    return {"neon"};
#endif
}

}  // namespace everstream
