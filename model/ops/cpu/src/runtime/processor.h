// The levels of vector instructions that this processor has. CMakeLists.txt also compiles it alone, to
// build for this machine.
#pragma once

#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace everstream {

#if defined(__x86_64__)
// Whether this process may use AMX: the processor has int8 and bfloat16 (CPUID 7), the system keeps
// the registers of the unit (XCR0), and lets them be used, which it has to be asked for
// (ARCH_REQ_XCOMP_PERM of Linux 5.16; a container may forbid the call).
inline bool may_use_amx() {
#if defined(__linux__)
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, XSAVE = 1u << 27;
    constexpr unsigned KEPT = 3u << 17;  // shapes and data
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & XSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & (BF16 | TILE | INT8)) != (BF16 | TILE | INT8)) return false;
    unsigned low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return (low & KEPT) == KEPT && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

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
    if (dot && may_use_amx()) return {"amx", "v4dot", "v4", "v3", "v2"};
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
