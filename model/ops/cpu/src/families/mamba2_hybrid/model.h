// A hybrid over Mamba-2; the equations are in model/families/mamba2_hybrid.
#pragma once

#include "families/bounded/model.h"
#include "families/mamba/mamba2_model.h"

namespace everstream {

struct Mamba2HybridLayer {
    Norm norm;
    bool is_attention = false;  // else its mixer is in `Mamba2HybridModel::mamba`
    BoundedAttention attention;
    Mlp mlp;
};

// After the buffers of the attention, those of Mamba-2.
struct Mamba2HybridBuffers : BoundedBuffers {
    enum { projected = BoundedBuffers::num, y, num };
};

struct Mamba2HybridModel : BoundedModel {
    Mamba2Mixers mamba;
    const Mamba2HybridLayer* layers = nullptr;
};

}  // namespace everstream
