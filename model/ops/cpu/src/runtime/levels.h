// The levels of vector instructions that were built, and which of them this machine has.
#pragma once

#include <string>
#include <vector>

#include "runtime/kernels.h"
#include "training/training.h"

namespace everstream {

// Names of the levels that were built, and of those among them that run here, the best one first.
std::vector<std::string> built_levels();
std::vector<std::string> levels();
// Throws std::invalid_argument for a level that does not run here; "" is the best one.
const Kernels& kernels_of(const std::string& level);
const TrainingKernels* training_of(const std::string& level);
// Bytes per second that `threads` threads read from buffers of `bytes` in all.
double read_bandwidth(size_t bytes, double seconds, int threads, const std::string& level);
// Operations per second of `threads` threads in products whose operands are in the nearest cache.
double multiply_add_rate(
    double seconds, int threads, Precision precision, const std::string& level);

}  // namespace everstream
