// A Jamba model: a hybrid over Mamba-1; the equations are in model/families/jamba.
#pragma once

#include "families/bounded/model.h"
#include "families/mamba/mamba1_model.h"

namespace everstream {

struct JambaLayer {
    Norm norm;
    bool is_attention = false;
    BoundedAttention attention;  // the other mixers are in `JambaModel::mamba`
    Mlp mlp;
};

// After the buffers of the attention, those of Mamba-1.
struct JambaBuffers : BoundedBuffers {
    enum { projected = BoundedBuffers::num, selected, delta, y, num };
};

struct JambaModel : BoundedModel {
    Mamba1Mixers mamba;
    const JambaLayer* layers = nullptr;
};

}  // namespace everstream
