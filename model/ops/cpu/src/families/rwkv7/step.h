// A whole step of a batch through an RWKV-7 model, by all threads of a team together. The equations
// are those of model/families/rwkv7/network.py.
#pragma once

#include "families/rwkv7/model.h"
#include "families/rwkv7/time_mix_step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Rwkv7Step : public TimeMixStep {
public:
    Rwkv7Step(const Rwkv7Model& m, const Batch& b, Worker& w) : TimeMixStep(m, b, w), m(m) {}

    void run() {
        w.each(b.num_rows, [&](int row) {
            float* x = b.x + size_t(row) * s.x;
            look_up(m.embedding, b.tokens[row], m.embedding_norm.weight ? before : x);
            if (m.embedding_norm.weight) normalize(m, m.embedding_norm, before, x);
        });
        const ChannelMix& first = m.channel_mixes[0];
        layers(bytes_of(first.key) + bytes_of(first.value), [&](const Part& part, auto updates_of) {
            channel_mix(part, updates_of);
        });
        finish();
    }

private:
    template <class UpdatesOf>
    void channel_mix(const Part& part, UpdatesOf updates_of) {
        const ChannelMix& l = m.channel_mixes[part.layer];
        const Input in = shared_input(b.buffers[B::shifted], s.x);
        norm_rows(l.norm, l.shift, part.rows, [&](int row, const float* last) {
            shift(in, 0, row, last, l.shift_mix);
        });
        products(
            Prepared{in, part.rows}, {{&l.key, into(B::hidden, Into::square_relu)}},
            part.sequences.num, [&](int i) { keep_row(l.shift, part.sequences.first + i); },
            updates_of(l.key));
        products(
            plain(B::hidden, m.intermediate, part.rows), {{&l.value, onto_x()}},
            updates_of(l.value));
    }

    const Rwkv7Model& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
