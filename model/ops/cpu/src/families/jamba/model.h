// A Jamba model: a hybrid over Mamba-1; the equations are in model/families/jamba.
#pragma once

#include "families/bounded/model.h"
#include "families/mamba/mamba1_model.h"

namespace everstream {

// After the buffers of the attention, those of Mamba-1.
struct JambaBuffers : BoundedBuffers {
    enum { projected = BoundedBuffers::num, selected, delta, y, num };
};

struct JambaModel : BoundedModel {
    Mamba1Mixers mamba;  // those of layers that are not attention
    const BoundedLayer* layers = nullptr;
};

}  // namespace everstream
