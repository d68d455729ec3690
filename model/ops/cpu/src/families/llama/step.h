// A whole step of a batch through a Llama model, by all threads of a team together. The equations are
// those of model/families/llama.
#pragma once

#include "families/bounded/step.h"
#include "families/llama/model.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class LlamaStep : BoundedStep {
public:
    LlamaStep(const LlamaModel& m, const Batch& b, Worker& w) : BoundedStep(m, b, w), m(m) {}

    void run() {
        begin();
        for (int i = 0; i < m.num_layers; i++) {
            const BoundedLayer& l = m.layers[i];
            attention(l.attention, l.norm);
            mlp(l.mlp, BoundedBuffers::hidden);
        }
        finish();
    }

    using BoundedStep::private_bytes;

private:
    const LlamaModel& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
