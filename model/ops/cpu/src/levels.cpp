#include "levels.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <thread>

namespace everstream {

namespace {

struct BuiltLevel {
    const Kernels* kernels;
    const TrainingKernels* training;
    bool runs;
};

std::vector<BuiltLevel> all_levels() {
    std::vector<BuiltLevel> levels;
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
    (void)dot, (void)v4, (void)v3, (void)v2;
#if defined(EVERSTREAM_HAS_V4DOT)
    levels.push_back({&kernels_v4dot, training_v4dot, dot});
#endif
#if defined(EVERSTREAM_HAS_V4)
    levels.push_back({&kernels_v4, training_v4, v4});
#endif
#if defined(EVERSTREAM_HAS_V3)
    levels.push_back({&kernels_v3, training_v3, v3});
#endif
#if defined(EVERSTREAM_HAS_V2)
    levels.push_back({&kernels_v2, training_v2, v2});
#endif
#else
    levels.push_back({&kernels_neon, training_neon, true});
#endif
    return levels;
}

}  // namespace

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const BuiltLevel& level : all_levels())
        if (level.runs) names.emplace_back(level.kernels->name);
    return names;
}

static BuiltLevel level_of(const std::string& name) {
    for (const BuiltLevel& level : all_levels())
        if (level.runs && (name.empty() || name == level.kernels->name)) return level;
    throw std::invalid_argument("level '" + name + "' does not run on this machine");
}

const Kernels& kernels_of(const std::string& name) { return *level_of(name).kernels; }
const TrainingKernels* training_of(const std::string& name) { return level_of(name).training; }

// The sum over threads that run at the same time.
static double on_threads(int threads, const std::function<double()>& rate) {
    std::vector<double> rates(static_cast<size_t>(threads));
    std::vector<std::thread> workers;
    for (double& result : rates) workers.emplace_back([&rate, &result] { result = rate(); });
    for (std::thread& worker : workers) worker.join();
    return std::accumulate(rates.begin(), rates.end(), 0.0);
}

double read_bandwidth(size_t bytes, double seconds, int threads, const std::string& level) {
    const Kernels& kernels = kernels_of(level);
    const size_t each = std::max<size_t>(bytes / size_t(threads), 4096);
    return on_threads(threads, [&] {
        const std::vector<float> memory(each / 4, 1.0f);
        return kernels.read_rate(memory.data(), each, seconds);
    });
}

double multiply_add_rate(
    double seconds, int threads, Precision precision, const std::string& level) {
    const Kernels& kernels = kernels_of(level);
    return on_threads(threads, [&] { return kernels.multiply_add_rate(seconds, precision); });
}

}  // namespace everstream
