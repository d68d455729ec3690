// The Mamba-2 mixers of a step, of Mamba-2 models and of hybrids. The equations are those of
// model/families/mamba/network.py.
#pragma once

#include "families/mamba/mamba2_model.h"
#include "families/mamba/mamba2_recurrence.h"
#include "runtime/step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// `Base` is a Step, `Places` has the places of the buffers `projected` and `y`.
template <class Base, class Places>
class Mamba2MixerStep : protected Base {
protected:
    template <class M>
    Mamba2MixerStep(const M& model, const Mamba2Mixers& mixers, const Batch& b, Worker& w)
        : Base(model, b, w), mixers(mixers) {}

    using Base::b;
    using Base::buffer;
    using Base::model;
    using Base::s;
    using Base::w;

    // The whole mixer of a layer.
    void mixer(const Norm& norm, const Part& all) {
        Base::products(Base::normed(norm), {{&mixer_of(all).in, Base::into(Places::projected)}});
        mamba2(all);
        project(all, NoUpdates());
    }

    // What follows the products with `in`, up to those with `out`.
    void mamba2(const Part& all) {
        convolve_and_leave(all, Part());
        w.each(num_heads(all), [&](int task) { head(all, task); });
        convolve_and_leave(Part(), all);
    }

    const Mamba2Mixer& mixer_of(const Part& part) const { return mixers.layers[part.layer]; }

    // The convolutions of one part, and for another what its heads give to `project`.
    void convolve_and_leave(const Part& in, const Part& out) {
        const int slices = (mixers.channels + SLICE - 1) / SLICE, num = in.sequences.num * slices;
        w.each(num + out.rows.num, [&](int task) {
            if (task < num)
                return convolve(
                    mixer_of(in), in.sequences.first + task / slices, task % slices * SLICE);
            const int row = out.rows.first + task - num;
            gated_group_norm(mixer_of(out), row);
            if (needs_preparation(model.precision))
                prepare_row(model.precision, gated(), row, mixers.inner);
        });
    }

    template <class Updates>
    void project(const Part& part, Updates updates) {
        const typename Base::Prepared rows{gated(), part.rows};
        Base::products(rows, {{&mixer_of(part).out, Base::onto_x()}}, updates);
    }

    int num_heads(const Part& part) const { return part.sequences.num * mixers.num_heads; }
    auto updates(const Part& part, int begin, int end) {
        const auto memory = [this, part](int task) {
            return b.sources[sequence_of(part, task)] + state_offset(part, task);
        };
        const auto update = [this, part](int task) { head(part, task); };
        return Updates<decltype(memory), decltype(update)>{
            begin, end, state_bytes(), memory, update};
    }

    // All tokens of a sequence through one head.
    void head(const Part& part, int task) {
        const Mamba2Mixer& l = mixer_of(part);
        const int sequence = sequence_of(part, task), h = task % mixers.num_heads;
        const int N = mixers.state_size, P = mixers.head_size, end = b.first_row[sequence + 1];
        const int group = h / (mixers.num_heads / mixers.num_groups);
        char* S = Base::enter_state(sequence, state_offset(part, task), state_bytes());
        for (int row = b.first_row[sequence]; row < end; row++) {
            const float* x = mixed(row);
            const double delta = softplus(double(dt(row, h)) + double(l.dt_bias[h]));
            SsdToken t;
            t.decay = float(std::expm1(double(l.rate[h]) * delta));
            t.delta = float(delta);
            t.skip = l.skip[h];
            t.x0 = x + h * P;
            t.b = x + mixers.inner + group * N;
            t.c = t.b + mixers.num_groups * N;
            float* y = buffer(Places::y, row) + h * P;
            if (model.rounds_sums)
                update_state(
                    Rounded(b.states[sequence], b.positions[row]), (Rounded::T*)S, N, P, t, y);
            else
                update_state(Single(), (float*)S, N, P, t, y);
        }
    }

private:
    // Channels of a task of the convolution.
    static constexpr int SLICE = 128;

    Input gated() const {
        return Base::shared_input(b.buffers[Places::y], s.buffers[Places::y]);
    }
    int sequence_of(const Part& part, int task) const {
        return part.sequences.first + task / mixers.num_heads;
    }
    size_t state_bytes() const {
        return model.sum_bytes(size_t(mixers.state_size) * mixers.head_size);
    }
    size_t state_offset(const Part& part, int task) const {
        return mixer_of(part).S + size_t(task % mixers.num_heads) * state_bytes();
    }

    // What `in` gives of a token, in its parts.
    float* z(int row) const { return buffer(Places::projected, row); }
    float* mixed(int row) const { return z(row) + mixers.inner; }
    float dt(int row, int h) const { return mixed(row)[mixers.channels + h]; }

    // All tokens of a sequence through the convolution of some channels, in place.
    void convolve(const Mamba2Mixer& l, int sequence, int begin) {
        const int channels = mixers.channels, size = mixers.conv_size;
        const int n = channels - begin < SLICE ? channels - begin : SLICE;
        float* ring = Base::enter_ring(sequence, l.ring, size, channels, begin, n);
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            float* x = mixed(row) + begin;
            convolve_silu(
                l.conv + begin, ring, x, size, size_t(channels), n, x, l.conv_bias + begin);
        }
    }

    // y = norm(y silu(z)), each group by itself; in place. Without a norm y silu(z).
    void gated_group_norm(const Mamba2Mixer& l, int row) {
        const int n = mixers.inner / mixers.num_groups;
        float* y = buffer(Places::y, row);
        map(y, y, z(row), mixers.inner, [](F a, F gate) { return a * silu(gate); });
        if (!l.inner_norm.weight) return;
        for (int at = 0; at < mixers.inner; at += n)
            rms_norm(y + at, l.inner_norm.weight + at, model.eps, n);
    }

    const Mamba2Mixers& mixers;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
