// An LFM2 or LFM3 model; the equations are in model/families/lfm2 and lfm3. D is the width.
#pragma once

#include "families/bounded/model.h"

namespace everstream {

struct ShortConvolution {
    Matrix in, out;               // [3 D, D]: B, C and x; [D, D]
    const float* conv = nullptr;  // [W][D]
    size_t ring = 0;              // byte offset of the last products of B and x [W - 1][D]
};

struct Lfm2Layer : BoundedLayer {
    ShortConvolution convolution;  // where it is not attention
    Norm post, mlp_post;           // of what the mixer and the MLP give, or nothing
};

// After the buffers of the attention: what the convolution gives.
struct Lfm2Buffers : BoundedBuffers {
    enum { mixed = BoundedBuffers::num, num };
};

struct Lfm2Model : BoundedModel {
    int conv_size = 0;  // W
    const Lfm2Layer* layers = nullptr;
};

}  // namespace everstream
