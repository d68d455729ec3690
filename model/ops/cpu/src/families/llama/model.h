// A Llama model; the equations are in model/families/llama.
#pragma once

#include "families/bounded/model.h"

namespace everstream {

struct LlamaModel : BoundedModel {
    const BoundedLayer* layers = nullptr;
};

}  // namespace everstream
