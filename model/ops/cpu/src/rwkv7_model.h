// An RWKV-7 model; the equations are in model/architectures/rwkv7.
//
// D is the width, F the inner width of the channel mix.
#pragma once

#include "time_mix_model.h"

namespace everstream {

struct Rwkv7Layer {
    Norm time_norm, channel_norm;
    TimeMix time_mix;
    const float* channel_shift_mix = nullptr;  // [D]
    Matrix channel_key, channel_value;
    size_t channel_shift = 0;  // byte offset of the last input of the channel mix [D]
};

struct Rwkv7Model : TimeMixModel {
    int intermediate = 0;  // F
    Norm embedding_norm;   // no weight where the rows of the embedding are normed already
    const Rwkv7Layer* layers = nullptr;
};

}  // namespace everstream
