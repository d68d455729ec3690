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
            const BoundedLayer& l = m.layers[i];
            if (l.is_attention && m.is_mamba(i))
                parallel(l, whole(i));
            else if (l.is_attention)
                attention(l.attention, l.norm);
            else if (m.is_mamba(i))
                mixer(l.norm, whole(i));
            else
                squared_relu(l);
            if (m.ends_with_mlp) mlp(l.mlp, B::hidden);
        }
        finish();
    }

    using BoundedStep::private_bytes;

private:
    // Both read the normed x before either adds to it.
    void parallel(const BoundedLayer& l, const Part& all) {
        products(
            normed(l.norm),
            {{&l.attention.in, into(B::in)}, {&mixer_of(all).in, into(B::projected)}});
        attend_and_leave(l.attention);
        mamba2(all);
        project(all, NoUpdates());
    }

    void squared_relu(const BoundedLayer& l) {
        products(normed(l.norm), {{&l.mlp.up, into(B::hidden, Into::square_relu)}});
        products(plain(B::hidden, m.intermediate), {{&l.mlp.down, onto_x()}});
    }

    using B = Mamba2HybridBuffers;
    const Mamba2HybridModel& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
