// A whole step of a batch through an RWKV-7 model, by all threads of a team together. The equations
// are those of model/architectures/rwkv7/network.py.
#pragma once

#include "rwkv7_model.h"
#include "time_mix_step.h"

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
        for (int i = 0; i < m.num_layers; i++) {
            time_mix(m.layers[i].time_norm, m.layers[i].time_mix, i == 0);
            channel_mix(m.layers[i]);
        }
        finish();
    }

private:
    void channel_mix(const Rwkv7Layer& l) {
        const Input in = shared_input(b.buffers[B::shifted], s.x);
        w.each(b.num_rows, [&](int row) {
            const float* last = norm_pair(l.channel_norm, l.channel_shift, row);
            shift(in, 0, row, last, l.channel_shift_mix);
        });
        products(
            Prepared{in, all_rows()},
            {{&l.channel_key, into(B::hidden, Into::square_relu)}},
            b.num_sequences, [&](int sequence) { keep_row(l.channel_shift, sequence); });
        products(plain(B::hidden, m.intermediate), {{&l.channel_value, onto_x()}});
    }

    const Rwkv7Model& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
