// A whole step of a batch through a Jamba model, by all threads of a team together. The equations are
// those of model/families/jamba.
#pragma once

#include "families/bounded/step.h"
#include "families/jamba/model.h"
#include "families/mamba/mamba1_mixer_step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class JambaStep : Mamba1MixerStep<BoundedStep, JambaBuffers> {
public:
    JambaStep(const JambaModel& m, const Batch& b, Worker& w)
        : Mamba1MixerStep(m, m.mamba, b, w), m(m) {}

    void run() {
        begin();
        for (int i = 0; i < m.num_layers; i++) {
            const BoundedLayer& l = m.layers[i];
            if (l.is_attention)
                attention(l.attention, l.norm);
            else
                mamba1(l.norm, i);
            mlp(l.mlp, JambaBuffers::hidden);
        }
        finish();
    }

    using BoundedStep::private_bytes;

private:
    const JambaModel& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
