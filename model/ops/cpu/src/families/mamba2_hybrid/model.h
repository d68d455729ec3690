// A hybrid over Mamba-2; the equations are in model/families/mamba2_hybrid.
#pragma once

#include "families/bounded/model.h"
#include "families/mamba/mamba2_model.h"

namespace everstream {

// After the buffers of the attention, those of Mamba-2.
struct Mamba2HybridBuffers : BoundedBuffers {
    enum { projected = BoundedBuffers::num, y, num };
};

struct Mamba2HybridModel : BoundedModel {
    Mamba2Mixers mamba;
    // Attention, a Mamba-2, both of the same normed input, or neither: an MLP of squared ReLU, which has
    // no norm of its own, and rows of `up` alone.
    const BoundedLayer* layers = nullptr;
    int intermediate = 0;        // the width inside the MLPs
    bool ends_with_mlp = false;  // whether each layer has one behind its mixers
    bool is_mamba(int layer) const { return mamba.layers[layer].in.n > 0; }
};

}  // namespace everstream
