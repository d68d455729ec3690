#include "levels.h"

#include <chrono>
#include <stdexcept>
#include <thread>

namespace everstream {

namespace {

struct Level {
    const Kernels* kernels;
    bool runs;
};

std::vector<Level> all_levels() {
    std::vector<Level> levels;
    levels.reserve(4);
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
    (void)dot, (void)v4, (void)v3;
#if defined(EVERSTREAM_HAS_V4DOT)
    levels.push_back({&kernels_v4dot, dot});
#endif
#if defined(EVERSTREAM_HAS_V4)
    levels.push_back({&kernels_v4, v4});
#endif
#if defined(EVERSTREAM_HAS_V3)
    levels.push_back({&kernels_v3, v3});
#endif
    levels.push_back({&kernels_v2, v2});
#else
    levels.push_back({&kernels_neon, true});
#endif
    return levels;
}

}  // namespace

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const Level& level : all_levels())
        if (level.runs) names.emplace_back(level.kernels->name);
    return names;
}

const Kernels& kernels_of(const std::string& name) {
    for (const Level& level : all_levels())
        if (level.runs && (name.empty() || name == level.kernels->name)) return *level.kernels;
    throw std::invalid_argument("level '" + name + "' does not run on this machine");
}

double read_bandwidth(size_t bytes, double seconds, int threads) {
    const size_t each = std::max<size_t>(bytes / size_t(threads) / 8, 1024);
    std::vector<double> rates(static_cast<size_t>(threads));
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; t++)
        workers.emplace_back([&, t] {
            std::vector<uint64_t> buffer(each, uint64_t(t) + 1);
            volatile uint64_t sink = 0;
            const auto begin = std::chrono::steady_clock::now();
            double elapsed = 0, read = 0;
            while (elapsed < seconds) {
                uint64_t sums[8] = {};
                for (size_t i = 0; i + 8 <= each; i += 8)
                    for (size_t j = 0; j < 8; j++) sums[j] += buffer[i + j];
                for (uint64_t sum : sums) sink = sink + sum;
                read += double(each * 8);
                const auto now = std::chrono::steady_clock::now();
                elapsed = std::chrono::duration<double>(now - begin).count();
            }
            rates[size_t(t)] = read / elapsed;
        });
    double total = 0;
    for (int t = 0; t < threads; t++) {
        workers[size_t(t)].join();
        total += rates[size_t(t)];
    }
    return total;
}

}  // namespace everstream
