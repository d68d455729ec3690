// Compiled once per level, like kernels.cpp.
#include "training/training.h"

#include "training/convolution.h"
#include "training/delta.h"
#include "training/rows.h"

#define EVERSTREAM_JOIN(a, b) a##b
#define EVERSTREAM_TRAINING(level) EVERSTREAM_JOIN(training_, level)

namespace everstream {
namespace EVERSTREAM_LEVEL {
namespace {

#if EVERSTREAM_PAIRS
using LowOperands = Pairs;
#else
using LowOperands = Singles;
#endif

template <class T, class Op>
constexpr TrainingKernels training_kernels() {
    return {
        norm<T>,
        norm_backward<T>,
        gated_norm<T>,
        gated_norm_backward<T>,
        swiglu<T>,
        swiglu_backward<T>,
        convolution<T>,
        convolution_backward<T>,
        delta<T, Op>,
        delta_backward<T, Op>,
        cross_entropy<T>,
    };
}

}  // namespace
}  // namespace EVERSTREAM_LEVEL

extern const TrainingKernels EVERSTREAM_TRAINING(EVERSTREAM_LEVEL)[2];
const TrainingKernels EVERSTREAM_TRAINING(EVERSTREAM_LEVEL)[2] = {
    EVERSTREAM_LEVEL::training_kernels<float, EVERSTREAM_LEVEL::Singles>(),
    EVERSTREAM_LEVEL::training_kernels<EVERSTREAM_LEVEL::Bf16, EVERSTREAM_LEVEL::LowOperands>(),
};

}  // namespace everstream
