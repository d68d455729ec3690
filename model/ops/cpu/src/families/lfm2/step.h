// A whole step of a batch through an LFM2 or LFM3 model, by all threads of a team together. The equations
// are those of model/families/lfm2 and lfm3.
#pragma once

#include "families/bounded/step.h"
#include "families/lfm2/model.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Lfm2Step : BoundedStep {
public:
    Lfm2Step(const Lfm2Model& m, const Batch& b, Worker& w) : BoundedStep(m, b, w), m(m) {}

    void run() {
        begin();
        for (int i = 0; i < m.num_layers; i++) {
            const Lfm2Layer& l = m.layers[i];
            if (l.is_attention)
                attention(l.attention, l.norm, l.post);
            else
                convolution(l.convolution, l.norm, l.post);
            mlp(l.mlp, B::hidden, l.mlp_post, B::in);
        }
        finish();
    }

    using BoundedStep::private_bytes;

private:
    // Channels of a task.
    static constexpr int CHANNELS = 256;

    void convolution(const ShortConvolution& l, const Norm& norm, const Norm& post) {
        const int parts = (m.hidden + CHANNELS - 1) / CHANNELS;
        products(normed(norm), {{&l.in, into(B::in)}});
        w.each(b.num_sequences * parts, [&](int task) {
            channels(l, task / parts, task % parts * CHANNELS);
        });
        add_to_x(plain(B::mixed, m.hidden), l.out, post, B::in);
    }

    // All rows of a sequence through some channels: C conv(B x).
    void channels(const ShortConvolution& l, int sequence, int first) {
        const int D = m.hidden, n = D - first < CHANNELS ? D - first : CHANNELS;
        float* ring = enter_ring(sequence, l.ring, m.conv_size, D, first, n);
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            const float* in = buffer(B::in, row) + first;
            float* y = buffer(B::mixed, row) + first;
            const auto product = [](F a, F b) { return a * b; };
            map(y, in, in + 2 * D, n, product);
            convolve(l.conv + first, ring, y, m.conv_size, size_t(D), n, y, [](F sum) { return sum; });
            map(y, y, in + D, n, product);
        }
    }

    using B = Lfm2Buffers;
    const Lfm2Model& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
