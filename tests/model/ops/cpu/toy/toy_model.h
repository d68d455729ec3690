// The family of toy.py; D is the width.
#pragma once

#include "runtime/model.h"

namespace everstream {

struct ToyLayer {
    Norm norm;
    Matrix mix, out;                               // [3 D, D]: values, gates, decays; [D, D]
    const float *conv = nullptr, *gain = nullptr;  // [W][D], [D]
    size_t ring = 0, sum = 0;                      // offsets of [W - 1][D] and [D]
};

struct ToyModel : Model {
    enum Buffers { mixed, read };
    int conv_size = 0;
    const ToyLayer* layers = nullptr;
};

}  // namespace everstream
