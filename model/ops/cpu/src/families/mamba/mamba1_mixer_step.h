// The Mamba-1 mixers of a step, of Mamba-1 models and of hybrids. The equations are those of
// model/families/mamba/network.py.
#pragma once

#include "families/mamba/mamba1_model.h"
#include "families/mamba/mamba1_recurrence.h"
#include "runtime/step.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// `Base` is a Step, `Places` has the places of the buffers `projected`, `selected`, `delta` and `y`.
template <class Base, class Places>
class Mamba1MixerStep : protected Base {
protected:
    template <class M>
    Mamba1MixerStep(const M& model, const Mamba1Mixers& mixers, const Batch& b, Worker& w)
        : Base(model, b, w), mixers(mixers) {}

    using Base::b;
    using Base::buffer;
    using Base::into;
    using Base::model;
    using Base::plain;
    using Base::products;
    using Base::s;
    using Base::w;

    void mamba1(const Norm& norm, int layer) {
        const Mamba1Mixer& l = mixers.layers[layer];
        products(Base::normed(norm), {{&l.in, into(Places::projected)}});
        each_slice([&](int sequence, int begin, int n) { convolve_slice(l, sequence, begin, n); });
        products(plain(Places::projected, mixers.inner), {{&l.x, into(Places::selected)}});
        const Input in =
            Base::shared_input(b.buffers[Places::selected], s.buffers[Places::selected]);
        w.each(b.num_rows, [&](int row) {
            if (mixers.norm_eps > 0.0f) normalize_selected(l, row);
            if (needs_preparation(model.precision))
                prepare_row(model.precision, in, row, mixers.rank);
        });
        const typename Base::Prepared rows{in, Base::all_rows()};
        products(rows, {{&l.dt, into(Places::delta)}});
        each_slice([&](int sequence, int begin, int n) { scan(l, sequence, begin, n); });
        products(plain(Places::y, mixers.inner), {{&l.out, Base::onto_x()}});
    }

private:
    // Channels of a task of the convolution or of the recurrence.
    static constexpr int SLICE = 64;

    // A task for each sequence and slice of channels.
    template <class Task>
    void each_slice(Task task) {
        const int slices = (mixers.inner + SLICE - 1) / SLICE;
        w.each(b.num_sequences * slices, [&](int i) {
            const int begin = i % slices * SLICE, left = mixers.inner - begin;
            task(i / slices, begin, left < SLICE ? left : SLICE);
        });
    }

    // All tokens of a sequence through the convolution of some channels, in place.
    void convolve_slice(const Mamba1Mixer& l, int sequence, int begin, int n) {
        const int size = mixers.conv_size, inner = mixers.inner;
        float* ring = Base::enter_ring(sequence, l.ring, size, inner, begin, n);
        for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
            float* x = buffer(Places::projected, row) + begin;
            convolve_silu(l.conv + begin, ring, x, size, size_t(inner), n, x, l.conv_bias + begin);
        }
    }

    // dt, B and C each over its own root mean square.
    void normalize_selected(const Mamba1Mixer& l, int row) {
        float* x = buffer(Places::selected, row);
        x = over_root(x, l.dt_norm, mixers.rank);
        x = over_root(x, l.b_norm, mixers.state_size);
        over_root(x, l.c_norm, mixers.state_size);
    }
    // In place; what follows. `weight` may be null.
    float* over_root(float* x, const float* weight, int n) {
        scale(x, 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + mixers.norm_eps), n);
        if (weight) map(x, x, weight, n, [](F a, F b) { return a * b; });
        return x + n;
    }

    // All tokens of a sequence through the recurrence of some channels.
    void scan(const Mamba1Mixer& l, int sequence, int begin, int n) {
        const size_t width = size_t(mixers.inner);
        const int N = mixers.state_size;
        const size_t offset = l.S + model.sum_bytes(size_t(begin));
        char* S = Base::enter_state(
            sequence, offset, model.sum_bytes(size_t(n)), N, model.sum_bytes(width));
        for (int j = begin; j < begin + n; j += F::W) {
            const int num = begin + n - j;
            const F skip = load_lanes(Single(), l.skip + j, num);
            for (int row = b.first_row[sequence]; row < b.first_row[sequence + 1]; row++) {
                const float* x = buffer(Places::projected, row) + j;
                const float* bc = buffer(Places::selected, row) + mixers.rank;
                const F delta = softplus(load_lanes(Single(), buffer(Places::delta, row) + j, num));
                const auto token = [&](const auto& e, auto* sums) {
                    return scan_token(
                        e, sums + (j - begin), l.rate + j, N, width, num,
                        load_lanes(Single(), x, num), delta, skip,
                        load_lanes(Single(), x + mixers.inner, num), bc, bc + N);
                };
                const F y = model.rounds_sums
                                ? token(Rounded(b.states[sequence], b.positions[row]), (Rounded::T*)S)
                                : token(Single(), (float*)S);
                store_lanes(Single(), buffer(Places::y, row) + j, num, y);
            }
        }
    }

    const Mamba1Mixers& mixers;
};

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
