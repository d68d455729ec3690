// A whole step of a batch through a Mamba-1 model, by all threads of a team together. The equations
// are those of model/families/mamba/network.py.
#pragma once

#include "families/mamba/mamba1_mixer_step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Mamba1Step : Mamba1MixerStep<Step, Mamba1Buffers> {
public:
    Mamba1Step(const Mamba1Model& m, const Batch& b, Worker& w)
        : Mamba1MixerStep(m, m.mixers, b, w), m(m) {}

    void run() {
        w.each(b.num_rows, [&](int row) {
            look_up(m.embedding, b.tokens[row], b.x + size_t(row) * s.x);
        });
        for (int i = 0; i < m.num_layers; i++) mamba1(m.norms[i], i);
        finish();
    }

    static size_t private_bytes(const Mamba1Model&, const Strides&) { return 0; }

private:
    const Mamba1Model& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
