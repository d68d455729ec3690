// A whole step of a batch through a hybrid over Mamba-2, by all threads of a team together. The
// equations are those of model/families/mamba2_hybrid.
#pragma once

#include "families/bounded/step.h"
#include "families/mamba/mamba2_mixer_step.h"
#include "families/mamba2_hybrid/model.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Mamba2HybridStep : Mamba2MixerStep<BoundedStep, Mamba2HybridBuffers> {
public:
    Mamba2HybridStep(const Mamba2HybridModel& m, const Batch& b, Worker& w)
        : Mamba2MixerStep(m, m.mamba, b, w), m(m) {}

    void run() {
        begin();
        for (int i = 0; i < m.num_layers; i++) {
            const Mamba2HybridLayer& l = m.layers[i];
            if (l.is_attention)
                attention(l.attention, l.norm);
            else
                recurrence(i);
            mlp(l.mlp, B::hidden);
        }
        finish();
    }

    static size_t private_bytes(const Mamba2HybridModel& m, const Strides&) {
        return BoundedStep::private_bytes(m);
    }
    static int max_phases(const Mamba2HybridModel& m) {
        return 8 + (ATTENTION_PHASES + MAMBA2_PHASES + MLP_PHASES) * m.num_layers;
    }

private:
    void recurrence(int layer) {
        const Part all = whole(layer);
        products(normed(m.layers[layer].norm), {{&mixer_of(all).in, into(B::projected)}});
        mamba2(all);
        project(all, NoUpdates());
    }

    using B = Mamba2HybridBuffers;
    const Mamba2HybridModel& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
