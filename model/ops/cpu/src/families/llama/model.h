// A Llama model; the equations are in model/families/llama.
#pragma once

#include "families/bounded/model.h"

namespace everstream {

struct LlamaLayer {
    Norm norm;
    BoundedAttention attention;
    Mlp mlp;
};

struct LlamaModel : BoundedModel {
    const LlamaLayer* layers = nullptr;
};

}  // namespace everstream
