// A whole step of a batch through a Mamba-2 model, by all threads of a team together. The equations
// are those of model/families/mamba/network.py.
#pragma once

#include "families/mamba/mamba2_mixer_step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Mamba2Step : Mamba2MixerStep<Step, Mamba2Buffers> {
public:
    Mamba2Step(const Mamba2Model& m, const Batch& b, Worker& w)
        : Mamba2MixerStep(m, m.mixers, b, w), m(m) {}

    void run() {
        w.each(b.num_rows, [&](int row) {
            look_up(m.embedding, b.tokens[row], b.x + size_t(row) * s.x);
        });
        if (goes_in_halves())
            layers_in_halves();
        else
            for (int i = 0; i < m.num_layers; i++) mixer(m.norms[i], whole(i));
        finish();
    }

    static size_t private_bytes(const Mamba2Model&, const Strides&) { return 0; }

private:
    template <class Updates>
    void enter(const Part& part, Updates updates) {
        const auto rows = normed(m.norms[part.layer], part.rows);
        products(rows, {{&mixer_of(part).in, into(Mamba2Buffers::projected)}}, updates);
    }

    // The heads of a part are updated between two products of the part before or after it: those that
    // leave a layer take as many of them as is their share of the weights.
    void layers_in_halves() {
        const Mamba2Mixer& first = m.mixers.layers[0];
        const int64_t leaving = bytes_of(first.out), entering = bytes_of(first.in);
        Part before;
        int done = 0;  // heads of `before`
        for (int i = 0; i < 2 * m.num_layers; i++) {
            const Part now = half(i / 2, i % 2);
            enter(now, updates(before, done, num_heads(before)));
            convolve_and_leave(now, before);
            done = i ? int(num_heads(now) * leaving / (leaving + entering)) : 0;
            if (i) project(before, updates(now, 0, done));
            before = now;
        }
        w.each(num_heads(before) - done, [&](int task) { head(before, done + task); });
        convolve_and_leave(Part(), before);
        project(before, NoUpdates());
    }

    const Mamba2Model& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
