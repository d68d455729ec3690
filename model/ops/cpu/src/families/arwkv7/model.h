// An ARWKV model: RWKV-7's time mix in blocks with RMS norms and an MLP of gated linear units; the
// equations are in model/families/rwkv7.
#pragma once

#include "families/rwkv7/time_mix_model.h"

namespace everstream {

struct Arwkv7Model : TimeMixModel {
    const Mlp* mlps = nullptr;  // of each layer
};

}  // namespace everstream
