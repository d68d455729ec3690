// A Mamba-1 model, and the mixers that hybrids have too; the equations are in model/families/mamba.
//
// D is the width, d the inner width, N the size of a channel's state, R the rank of dt, W the tokens
// that the convolution sees.
#pragma once

#include "runtime/model.h"

namespace everstream {

struct Mamba1Mixer {
    Matrix in, x, dt, out;  // rows of `in`: x [d], z [d]; of `x`: dt [R], B [N], C [N]
    // Of the norms of dt [R], B [N] and C [N]; null where there are none.
    const float *dt_norm = nullptr, *b_norm = nullptr, *c_norm = nullptr;
    const float *conv = nullptr, *conv_bias = nullptr;  // [W][d], [d]
    const float *rate = nullptr, *skip = nullptr;       // A [N][d], D [d]
    // Byte offsets of the last inputs of the convolution [W - 1][d], and of S [N][d].
    size_t ring = 0, S = 0;
};

struct Mamba1Mixers {
    int inner = 0, state_size = 0, conv_size = 0, rank = 0;
    float norm_eps = 0.0f;  // of the norms of dt, B and C; 0 where there are none
    const Mamba1Mixer* layers = nullptr;  // by layer; of those that are something else, empty
};

// The buffers of a step, by their place in `Batch::buffers`: what `in`, `x` and `dt` give, and the
// outputs of the recurrence [tokens][d].
struct Mamba1Buffers {
    enum { projected, selected, delta, y, num };
};

struct Mamba1Model : Model {
    Mamba1Mixers mixers;
    const Norm* norms = nullptr;  // of each layer
};

}  // namespace everstream
