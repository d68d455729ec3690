// An RWKV-7 model; the equations are in model/families/rwkv7.
//
// D is the width, F the inner width of the channel mix.
#pragma once

#include "families/rwkv7/time_mix_model.h"

namespace everstream {

struct ChannelMix {
    Norm norm;
    const float* shift_mix = nullptr;  // [D]
    Matrix key, value;
    size_t shift = 0;  // byte offset of the last input [D]
};

struct Rwkv7Model : TimeMixModel {
    int intermediate = 0;  // F
    Norm embedding_norm;   // no weight where the rows of the embedding are normed already
    const ChannelMix* channel_mixes = nullptr;  // of each layer
};

}  // namespace everstream
