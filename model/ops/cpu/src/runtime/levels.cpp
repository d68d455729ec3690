#include "runtime/levels.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "runtime/processor.h"

namespace everstream {

// A symbol is weak here, and null, where its level was not built.
#define EVERSTREAM_LEVEL_SYMBOLS(level)                               \
    extern const Kernels kernels_##level __attribute__((weak));       \
    extern const TrainingKernels training_##level[2] __attribute__((weak));
EVERSTREAM_LEVEL_SYMBOLS(v2)
EVERSTREAM_LEVEL_SYMBOLS(v3)
EVERSTREAM_LEVEL_SYMBOLS(v4)
EVERSTREAM_LEVEL_SYMBOLS(v4dot)
EVERSTREAM_LEVEL_SYMBOLS(amx)
EVERSTREAM_LEVEL_SYMBOLS(neon)

namespace {

struct BuiltLevel {
    const Kernels* kernels;
    const TrainingKernels* training;  // [2], by whether activations are bfloat16
};

// The best one first.
std::vector<BuiltLevel> all_levels() {
    std::vector<BuiltLevel> built;
    for (const BuiltLevel& level : {
             BuiltLevel{&kernels_amx, training_amx}, BuiltLevel{&kernels_v4dot, training_v4dot},
             BuiltLevel{&kernels_v4, training_v4}, BuiltLevel{&kernels_v3, training_v3},
             BuiltLevel{&kernels_v2, training_v2}, BuiltLevel{&kernels_neon, training_neon}})
        if (level.kernels) built.push_back(level);
    return built;
}

bool runs(const BuiltLevel& level) {
    for (const char* name : processor_levels())
        if (std::string(name) == level.kernels->name) return true;
    return false;
}

}  // namespace

std::vector<std::string> built_levels() {
    std::vector<std::string> names;
    for (const BuiltLevel& level : all_levels()) names.emplace_back(level.kernels->name);
    return names;
}

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const BuiltLevel& level : all_levels())
        if (runs(level)) names.emplace_back(level.kernels->name);
    return names;
}

static BuiltLevel level_of(const std::string& name) {
    for (const BuiltLevel& level : all_levels())
        if (runs(level) && (name.empty() || name == level.kernels->name)) return level;
    throw std::invalid_argument("level '" + name + "' was not built, or does not run on this machine");
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
