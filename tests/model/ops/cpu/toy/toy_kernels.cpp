#include "runtime/step.h"
#include "toy_model.h"

namespace everstream::EVERSTREAM_LEVEL {

struct ToyStep : Step {
    ToyStep(const ToyModel& m, const Batch& b, Worker& w) : Step(m, b, w), m(m) {}
    static size_t private_bytes(const ToyModel&, const Strides&) { return 0; }

    void run() {
        w.each(b.num_rows, [&](int row) {
            look_up(m.embedding, b.tokens[row], b.x + size_t(row) * s.x);
        });
        for (int i = 0; i < m.num_layers; i++) {
            const ToyLayer& l = m.layers[i];
            products(normed(l.norm), {{&l.mix, into(ToyModel::mixed)}});
            w.each(b.num_sequences, [&](int sequence) { read(l, sequence); });
            products(plain(ToyModel::read, m.hidden), {{&l.out, onto_x()}});
        }
        finish();
    }

    void read(const ToyLayer& l, int sequence) {
        const int D = m.hidden;
        float* ring = enter_ring(sequence, l.ring, m.conv_size, D, 0, D);
        float* sum = (float*)enter_state(sequence, l.sum, size_t(D) * sizeof(float));
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            const float* in = buffer(ToyModel::mixed, row);
            float* y = buffer(ToyModel::read, row);
            convolve_silu(l.conv, ring, in, m.conv_size, size_t(D), D, y);
            for (int i = 0; i < D; i++)
                y[i] = sum[i] = fma1(sum[i], softplus_decay(in[2 * D + i], -1.0f), sum[i]) + y[i];
            gated_norm(y, l.gain, in + D, m.eps, D);
        }
    }

    const ToyModel& m;
};

}  // namespace everstream::EVERSTREAM_LEVEL

EVERSTREAM_FAMILY_KERNELS(toy, ToyModel, ToyStep)
