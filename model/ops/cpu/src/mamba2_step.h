// A whole step of a batch through a Mamba-2 model, by all threads of a team together. The equations
// are those of model/architectures/mamba2/network.py.
#pragma once

#include "mamba2_model.h"
#include "mamba2_recurrence.h"
#include "step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Mamba2Step : Step {
public:
    Mamba2Step(const Mamba2Model& m, const Batch& b, Worker& w) : Step(m, b, w), m(m) {}

    void run() {
        w.each(b.num_rows, [&](int row) {
            look_up(m.embedding, b.tokens[row], b.x + size_t(row) * s.x);
        });
        for (int i = 0; i < m.num_layers; i++) layer(m.layers[i]);
        finish();
    }

    static size_t private_bytes(const Mamba2Model&, const Strides&) { return 0; }
    static int max_phases(const Mamba2Model& m) { return 8 + 6 * m.num_layers; }

private:
    // Channels of a task of the convolution.
    static constexpr int SLICE = 128;

    void layer(const Mamba2Layer& l) {
        products(normed(l.norm), {{&l.in, into(B::projected)}});
        const int slices = (m.channels + SLICE - 1) / SLICE;
        w.each(b.num_sequences * slices, [&](int task) {
            convolve(l, task / slices, task % slices * SLICE);
        });
        w.each(b.num_sequences * m.num_heads, [&](int task) {
            head(l, task / m.num_heads, task % m.num_heads);
        });
        const Input in = shared_input(b.buffers[B::y], s.buffers[B::y]);
        w.each(b.num_rows, [&](int row) {
            gated_group_norm(l, row);
            if (needs_preparation(m.precision)) prepare_row(m.precision, in, row, m.inner);
        });
        products(Prepared{in, b.num_rows}, {{&l.out, onto_x()}});
    }

    // What `in` gives of a token, in its parts.
    float* z(int row) const { return buffer(B::projected, row); }
    float* mixed(int row) const { return z(row) + m.inner; }
    float dt(int row, int h) const { return mixed(row)[m.channels + h]; }

    // All tokens of a sequence through the convolution of some channels, in place.
    void convolve(const Mamba2Layer& l, int sequence, int begin) {
        float* ring = (float*)(b.states[sequence] + l.ring) + begin;
        const int n = m.channels - begin < SLICE ? m.channels - begin : SLICE;
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            float* x = mixed(row) + begin;
            convolve_silu(
                l.conv + begin, ring, x, m.conv_size, size_t(m.channels), n, x,
                l.conv_bias + begin);
        }
    }

    // All tokens of a sequence through one head.
    void head(const Mamba2Layer& l, int sequence, int h) {
        const int N = m.state_size, P = m.head_size, end = b.first_row[sequence + 1];
        const int group = h / (m.num_heads / m.num_groups);
        float* S = (float*)(b.states[sequence] + l.S) + size_t(h) * N * P;
        for (int row = b.first_row[sequence]; row < end; row++) {
            const float* x = mixed(row);
            const double delta = softplus(double(dt(row, h)) + double(l.dt_bias[h]));
            SsdToken t;
            t.decay = float(std::expm1(double(l.rate[h]) * delta));
            t.delta = float(delta);
            t.skip = l.skip[h];
            t.x0 = x + h * P;
            t.b = x + m.inner + group * N;
            t.c = t.b + m.num_groups * N;
            update_state(S, N, P, t, buffer(B::y, row) + h * P);
        }
    }

    // y = norm(y silu(z)), each group by itself; in place.
    void gated_group_norm(const Mamba2Layer& l, int row) {
        const int n = m.inner / m.num_groups;
        float* y = buffer(B::y, row);
        map(y, y, z(row), m.inner, [](F a, F gate) { return a * silu(gate); });
        for (int at = 0; at < m.inner; at += n) rms_norm(y + at, l.inner_norm.weight + at, m.eps, n);
    }

    using B = Mamba2Buffers;
    const Mamba2Model& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
