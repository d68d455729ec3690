// A whole step of a batch through a Mamba-2 model, by all threads of a team together. The equations
// are those of model/families/mamba/network.py.
#pragma once

#include "families/mamba/mamba2_model.h"
#include "families/mamba/mamba2_recurrence.h"
#include "runtime/step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

class Mamba2Step : Step {
public:
    Mamba2Step(const Mamba2Model& m, const Batch& b, Worker& w) : Step(m, b, w), m(m) {}

    void run() {
        w.each(b.num_rows, [&](int row) {
            look_up(m.embedding, b.tokens[row], b.x + size_t(row) * s.x);
        });
        if (goes_in_halves())
            layers_in_halves();
        else
            for (int i = 0; i < m.num_layers; i++) layer(whole(i));
        finish();
    }

    static size_t private_bytes(const Mamba2Model&, const Strides&) { return 0; }
    static int max_phases(const Mamba2Model& m) { return 16 + 8 * m.num_layers; }

private:
    // Channels of a task of the convolution.
    static constexpr int SLICE = 128;

    template <class Updates>
    void enter(const Part& part, Updates updates) {
        const Mamba2Layer& l = m.layers[part.layer];
        products(normed(l.norm, part.rows), {{&l.in, into(B::projected)}}, updates);
    }

    // The convolutions of one part, and for another what its heads give to `project`.
    void convolve_and_leave(const Part& in, const Part& out) {
        const int slices = (m.channels + SLICE - 1) / SLICE, num = in.sequences.num * slices;
        w.each(num + out.rows.num, [&](int task) {
            if (task < num)
                return convolve(
                    m.layers[in.layer], in.sequences.first + task / slices, task % slices * SLICE);
            const int row = out.rows.first + task - num;
            gated_group_norm(m.layers[out.layer], row);
            if (needs_preparation(m.precision)) prepare_row(m.precision, gated(), row, m.inner);
        });
    }

    template <class Updates>
    void project(const Part& part, Updates updates) {
        const Prepared rows{gated(), part.rows};
        products(rows, {{&m.layers[part.layer].out, onto_x()}}, updates);
    }

    Input gated() const { return shared_input(b.buffers[B::y], s.buffers[B::y]); }

    int num_heads(const Part& part) const { return part.sequences.num * m.num_heads; }
    int sequence_of(const Part& part, int task) const {
        return part.sequences.first + task / m.num_heads;
    }
    size_t state_bytes() const { return m.sum_bytes(size_t(m.state_size) * m.head_size); }
    size_t state_offset(const Part& part, int task) const {
        return m.layers[part.layer].S + size_t(task % m.num_heads) * state_bytes();
    }
    auto updates(const Part& part, int begin, int end) {
        const auto memory = [this, part](int task) {
            return b.sources[sequence_of(part, task)] + state_offset(part, task);
        };
        const auto update = [this, part](int task) { head(part, task); };
        return Updates<decltype(memory), decltype(update)>{
            begin, end, state_bytes(), memory, update};
    }

    // What `in` gives of a token, in its parts.
    float* z(int row) const { return buffer(B::projected, row); }
    float* mixed(int row) const { return z(row) + m.inner; }
    float dt(int row, int h) const { return mixed(row)[m.channels + h]; }

    // All tokens of a sequence through the convolution of some channels, in place.
    void convolve(const Mamba2Layer& l, int sequence, int begin) {
        const int n = m.channels - begin < SLICE ? m.channels - begin : SLICE;
        float* ring = enter_ring(sequence, l.ring, m.conv_size, m.channels, begin, n);
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            float* x = mixed(row) + begin;
            convolve_silu(
                l.conv + begin, ring, x, m.conv_size, size_t(m.channels), n, x,
                l.conv_bias + begin);
        }
    }

    // All tokens of a sequence through one head.
    void head(const Part& part, int task) {
        const Mamba2Layer& l = m.layers[part.layer];
        const int sequence = sequence_of(part, task), h = task % m.num_heads;
        const int N = m.state_size, P = m.head_size, end = b.first_row[sequence + 1];
        const int group = h / (m.num_heads / m.num_groups);
        char* S = enter_state(sequence, state_offset(part, task), state_bytes());
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
            float* y = buffer(B::y, row) + h * P;
            if (m.rounds_sums)
                update_state(
                    Rounded(b.states[sequence], b.positions[row]), (Rounded::T*)S, N, P, t, y);
            else
                update_state(Single(), (float*)S, N, P, t, y);
        }
    }

    // y = norm(y silu(z)), each group by itself; in place.
    void gated_group_norm(const Mamba2Layer& l, int row) {
        const int n = m.inner / m.num_groups;
        float* y = buffer(B::y, row);
        map(y, y, z(row), m.inner, [](F a, F gate) { return a * silu(gate); });
        for (int at = 0; at < m.inner; at += n) rms_norm(y + at, l.inner_norm.weight + at, m.eps, n);
    }

    void layer(const Part& all) {
        enter(all, NoUpdates());
        convolve_and_leave(all, Part());
        w.each(num_heads(all), [&](int task) { head(all, task); });
        convolve_and_leave(Part(), all);
        project(all, NoUpdates());
    }

    // The heads of a part are updated between two products of the part before or after it: those that
    // leave a layer take as many of them as is their share of the weights.
    void layers_in_halves() {
        const int64_t leaving = bytes_of(m.layers[0].out), entering = bytes_of(m.layers[0].in);
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

    using B = Mamba2Buffers;
    const Mamba2Model& m;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
