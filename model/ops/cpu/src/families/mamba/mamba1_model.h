// A Mamba-1 model; the equations are in model/families/mamba.
//
// D is the width, d the inner width, N the size of a channel's state, R the rank of dt, W the tokens
// that the convolution sees.
#pragma once

#include "runtime/model.h"

namespace everstream {

struct MambaLayer {
    Norm norm;
    Matrix in, x, dt, out;  // rows of `in`: x [d], z [d]; of `x`: dt [R], B [N], C [N]
    const float *conv = nullptr, *conv_bias = nullptr;  // [W][d], [d]
    const float *rate = nullptr, *skip = nullptr;       // A [N][d], D [d]
    // Byte offsets of the last inputs of the convolution [W - 1][d], and of S [N][d].
    size_t ring = 0, S = 0;
};

// The buffers of a step, by their place in `Batch::buffers`: what `in`, `x` and `dt` give, and the
// outputs of the recurrence [tokens][d].
struct MambaBuffers {
    enum { projected, selected, delta, y, num };
};

struct MambaModel : Model {
    int inner = 0, state_size = 0, conv_size = 0, rank = 0;
    float mixer_eps = 0.0f;  // of the norms of dt, B and C; 0 where there are none
    const MambaLayer* layers = nullptr;
};

}  // namespace everstream
