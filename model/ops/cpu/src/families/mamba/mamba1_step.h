// A whole step of a batch through a Mamba-1 model, by all threads of a team together. The equations
// are those of model/families/mamba/network.py.
#pragma once

#include "families/mamba/mamba1_model.h"
#include "families/mamba/mamba1_recurrence.h"
#include "runtime/step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class MambaStep : Step {
public:
    MambaStep(const MambaModel& m, const Batch& b, Worker& w) : Step(m, b, w), m(m) {}

    void run() {
        w.each(b.num_rows, [&](int row) {
            look_up(m.embedding, b.tokens[row], b.x + size_t(row) * s.x);
        });
        for (int i = 0; i < m.num_layers; i++) layer(m.layers[i]);
        finish();
    }

    static size_t private_bytes(const MambaModel&, const Strides&) { return 0; }
    static int max_phases(const MambaModel& m) { return 8 + 10 * m.num_layers; }

private:
    // Channels of a task of the convolution or of the recurrence.
    static constexpr int SLICE = 64;

    void layer(const MambaLayer& l) {
        products(normed(l.norm), {{&l.in, into(B::projected)}});
        each_slice([&](int sequence, int begin, int n) { convolve_slice(l, sequence, begin, n); });
        products(plain(B::projected, m.inner), {{&l.x, into(B::selected)}});
        const Input in = shared_input(b.buffers[B::selected], s.buffers[B::selected]);
        w.each(b.num_rows, [&](int row) {
            if (m.mixer_eps > 0.0f) normalize_selected(row);
            if (needs_preparation(m.precision)) prepare_row(m.precision, in, row, m.rank);
        });
        products(Prepared{in, all_rows()}, {{&l.dt, into(B::delta)}});
        each_slice([&](int sequence, int begin, int n) { scan(l, sequence, begin, n); });
        products(plain(B::y, m.inner), {{&l.out, onto_x()}});
    }

    // A task for each sequence and slice of channels.
    template <class Task>
    void each_slice(Task task) {
        const int slices = (m.inner + SLICE - 1) / SLICE;
        w.each(b.num_sequences * slices, [&](int i) {
            const int begin = i % slices * SLICE;
            task(i / slices, begin, m.inner - begin < SLICE ? m.inner - begin : SLICE);
        });
    }

    // All tokens of a sequence through the convolution of some channels, in place.
    void convolve_slice(const MambaLayer& l, int sequence, int begin, int n) {
        float* ring = enter_ring(sequence, l.ring, m.conv_size, m.inner, begin, n);
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            float* x = buffer(B::projected, row) + begin;
            convolve_silu(
                l.conv + begin, ring, x, m.conv_size, size_t(m.inner), n, x, l.conv_bias + begin);
        }
    }

    // dt, B and C each over its own root mean square.
    void normalize_selected(int row) {
        float* x = buffer(B::selected, row);
        for (int n : {m.rank, m.state_size, m.state_size}) {
            scale(x, 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + m.mixer_eps), n);
            x += n;
        }
    }

    // All tokens of a sequence through the recurrence of some channels.
    void scan(const MambaLayer& l, int sequence, int begin, int n) {
        const size_t width = size_t(m.inner);
        const size_t offset = l.S + m.sum_bytes(size_t(begin));
        char* S = enter_state(
            sequence, offset, m.sum_bytes(size_t(n)), m.state_size, m.sum_bytes(width));
        for (int j = begin; j < begin + n; j += F::W) {
            const int num = begin + n - j;
            const F skip = load_lanes(Single(), l.skip + j, num);
            for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
                const float *x = buffer(B::projected, row) + j, *bc = buffer(B::selected, row) + m.rank;
                const F delta = softplus(load_lanes(Single(), buffer(B::delta, row) + j, num));
                const auto token = [&](const auto& e, auto* sums) {
                    return scan_token(
                        e, sums + (j - begin), l.rate + j, m.state_size, width, num,
                        load_lanes(Single(), x, num), delta, skip,
                        load_lanes(Single(), x + m.inner, num), bc, bc + m.state_size);
                };
                const F y = m.rounds_sums
                                ? token(Rounded(b.states[sequence], b.positions[row]), (Rounded::T*)S)
                                : token(Single(), (float*)S);
                store_lanes(Single(), buffer(B::y, row) + j, num, y);
            }
        }
    }

    using B = MambaBuffers;
    const MambaModel& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
