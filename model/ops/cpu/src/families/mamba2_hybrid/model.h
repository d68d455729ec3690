// A hybrid over Mamba-2; the equations are in model/families/mamba2_hybrid.
#pragma once

#include "families/bounded/model.h"
#include "families/mamba/mamba2_model.h"

namespace everstream {

// Attention, a Mamba-2, both of the same normed input, or neither: an MLP of squared ReLU.
struct Mamba2HybridLayer {
    Norm norm;
    bool is_attention = false, is_mamba = false;
    BoundedAttention attention;  // the other mixer is in `Mamba2HybridModel::mamba`
    Mlp mlp;                     // that of a layer of neither has no norm, and rows of `up` alone
};

// After the buffers of the attention, those of Mamba-2.
struct Mamba2HybridBuffers : BoundedBuffers {
    enum { projected = BoundedBuffers::num, y, num };
};

struct Mamba2HybridModel : BoundedModel {
    Mamba2Mixers mamba;
    int intermediate = 0;        // the width inside the MLPs
    bool ends_with_mlp = false;  // whether each layer has one behind its mixers
    const Mamba2HybridLayer* layers = nullptr;
};

}  // namespace everstream
