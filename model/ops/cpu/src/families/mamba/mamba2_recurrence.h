// Mamba-2's recurrence for one head and token (model/families/mamba/network.py):
//
//   S = S + S decay + b x^T;  y = S^T c + D x0
//
// S is [N][P], x = Delta x0, and decay is expm1 of the log decay. Lanes run over P and sums over N in
// order, so bits do not depend on the vector's width. S is read and written once.
#pragma once

#include "runtime/sums.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// What a token brings to a head.
struct SsdToken {
    float decay, delta, skip;
    const float *b, *c;  // [N]
    const float* x0;     // [P]
};

// J vectors of columns.
template <int J, class E>
inline void update_columns(
    const E& e, typename E::T* S, int num_rows, int num_columns, const SsdToken& t, int column, float* y) {
    const F decay = F::set(t.decay), delta = F::set(t.delta), skip = F::set(t.skip);
    F x[J], out[J];
    for (int j = 0; j < J; j++) {
        const F x0 = F::load(t.x0 + column + j * F::W);
        x[j] = delta * x0;
        out[j] = skip * x0;
    }
    S += column;
    for (int i = 0; i < num_rows; i++, S += num_columns) {
        const F b = F::set(t.b[i]), c = F::set(t.c[i]);
        for (int j = 0; j < J; j++) {
            F s = e.load(S + j * F::W);
            s = fma(s, decay, s);
            s = fma(b, x[j], s);
            e.store(s, S + j * F::W);
            out[j] = fma(c, s, out[j]);
        }
    }
    for (int j = 0; j < J; j++) out[j].store(y + column + j * F::W);
}

// The new S [num_rows][num_columns], kept as E says (sums.h), and y [num_columns].
template <class E>
inline void update_state(
    const E& e, typename E::T* S, int num_rows, int num_columns, const SsdToken& t, float* y) {
    constexpr int J = EVERSTREAM_REGISTERS == 32 ? 4 : 2;
    int j = 0;
    for (; j + J * F::W <= num_columns; j += J * F::W)
        update_columns<J>(e, S, num_rows, num_columns, t, j, y);
    for (; j + F::W <= num_columns; j += F::W)
        update_columns<1>(e, S, num_rows, num_columns, t, j, y);
    for (; j < num_columns; j++) {
        const float x = t.delta * t.x0[j];
        float out = t.skip * t.x0[j];
        for (int i = 0; i < num_rows; i++) {
            float s = e.one(S + size_t(i) * num_columns + j);
            s = fma1(s, t.decay, s);
            s = fma1(t.b[i], x, s);
            e.put(s, S + size_t(i) * num_columns + j);
            out = fma1(t.c[i], s, out);
        }
        y[j] = out;
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
