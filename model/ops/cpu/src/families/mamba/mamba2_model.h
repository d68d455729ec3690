// A Mamba-2 model, and the mixers that hybrids have too; the equations are in model/families/mamba.
//
// D is the width, H the number of heads, P the size of a head, N the size of its state, G the number
// of groups, d = H P the inner width, W the tokens that the convolution sees.
#pragma once

#include "runtime/model.h"

namespace everstream {

struct Mamba2Mixer {
    Norm inner_norm;  // without weights where the gated channels are not normed
    Matrix in, out;  // rows of `in`: z [d], x [d], B [G N], C [G N], dt [H]
    const float *conv = nullptr, *conv_bias = nullptr;  // [W][d + 2 G N], [d + 2 G N]
    const float *dt_bias = nullptr, *rate = nullptr, *skip = nullptr;  // [H]: rate is A, skip D
    // Byte offsets of the last inputs of the convolution [W - 1][d + 2 G N], and of S [H][N][P].
    size_t ring = 0, S = 0;
};

struct Mamba2Mixers {
    int num_heads = 0, head_size = 0, state_size = 0, num_groups = 0, conv_size = 0;
    int inner = 0, channels = 0;  // d, and d + 2 G N
    const Mamba2Mixer* layers = nullptr;  // by layer; of those that are something else, empty
    int rows_of_in() const { return inner + channels + num_heads; }
};

// The buffers of a step, by their place in `Batch::buffers`: what `in` gives, [tokens][rows of in],
// and what the heads give, [tokens][d].
struct Mamba2Buffers {
    enum { projected, y, num };
};

struct Mamba2Model : Model {
    Mamba2Mixers mixers;
    const Norm* norms = nullptr;  // of each layer
};

}  // namespace everstream
