// RWKV-7's recurrence for one head (model/families/rwkv7/network.py):
//
//   u = S^T c;  S = S + S decay - d u^T + k v^T;  y = S^T r
//
// S is [N key][N value], kept as E says (sums.h); decay is expm1 of the log decay. Lanes run over the value and sums over
// the key in order, so bits do not depend on the vector's width. One pass writes S for a token and
// reads it for the next one; what is added in which order does not depend on that.
#pragma once

#include "runtime/sums.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// What a token brings to a head, [N] each.
struct HeadToken {
    float *decay, *k, *c, *minus_d, *v;
    const float* r;
};

template <int J, class E>
inline void read_columns(const E& e, const typename E::T* S, int n, const float* c, float* u) {
    F acc[J];
    for (F& a : acc) a = F::set(0.0f);
    for (int i = 0; i < n; i++, S += n) {
        const F ci = F::set(c[i]);
        for (int j = 0; j < J; j++) acc[j] = fma(ci, e.load(S + j * F::W), acc[j]);
    }
    for (int j = 0; j < J; j++) acc[j].store(u + j * F::W);
}

// u = S^T c
template <class E>
inline void read_state(const E& e, const typename E::T* S, int n, const float* c, float* u) {
    int j = 0;
    for (; j + 4 * F::W <= n; j += 4 * F::W) read_columns<4>(e, S + j, n, c, u + j);
    for (; j + F::W <= n; j += F::W) read_columns<1>(e, S + j, n, c, u + j);
    for (; j < n; j++) {
        float acc = 0.0f;
        for (int i = 0; i < n; i++) acc = fma1(c[i], e.one(S + size_t(i) * n + j), acc);
        u[j] = acc;
    }
}

template <int J, bool NEXT, class E>
inline void update_columns(
    const E& e, typename E::T* S, int n, const HeadToken& t, int column, float* u, float* y, const float* next_c,
    size_t ahead) {
    F value[J], removed[J], out[J], next[J];
    for (int j = 0; j < J; j++) {
        value[j] = F::load(t.v + column + j * F::W);
        removed[j] = F::load(u + column + j * F::W);
        out[j] = next[j] = F::set(0.0f);
    }
    S += column;
    for (int i = 0; i < n; i++, S += n) {
        const F decay = F::set(t.decay[i]), d = F::set(t.minus_d[i]), k = F::set(t.k[i]);
        const F r = F::set(t.r[i]), c = F::set(NEXT ? next_c[i] : 0.0f);
        if (!NEXT)
            for (int line = 0; line < J * F::W; line += int(64 / sizeof(typename E::T)))
                __builtin_prefetch(S + ahead + line, 1);
        for (int j = 0; j < J; j++) {
            F x = e.load(S + j * F::W);
            x = fma(x, decay, x);
            x = fma(d, removed[j], x);
            x = fma(k, value[j], x);
            e.store(x, S + j * F::W);
            out[j] = fma(r, x, out[j]);
            if (NEXT) next[j] = fma(c, x, next[j]);
        }
    }
    for (int j = 0; j < J; j++) {
        out[j].store(y + column + j * F::W);
        if (NEXT) next[j].store(u + column + j * F::W);
    }
}

template <bool NEXT, class E>
inline void update_all(
    const E& e, typename E::T* S, int n, const HeadToken& t, float* u, float* y, const float* next_c, size_t ahead) {
    constexpr int J = EVERSTREAM_REGISTERS == 32 ? 4 : 2;
    int j = 0;
    for (; j + J * F::W <= n; j += J * F::W) update_columns<J, NEXT>(e, S, n, t, j, u, y, next_c, ahead);
    for (; j + F::W <= n; j += F::W) update_columns<1, NEXT>(e, S, n, t, j, u, y, next_c, ahead);
    for (; j < n; j++) {
        float out = 0.0f, next = 0.0f;
        for (int i = 0; i < n; i++) {
            float s = e.one(S + size_t(i) * n + j);
            s = fma1(s, t.decay[i], s);
            s = fma1(t.minus_d[i], u[j], s);
            s = fma1(t.k[i], t.v[j], s);
            e.put(s, S + size_t(i) * n + j);
            out = fma1(t.r[i], s, out);
            if (NEXT) next = fma1(next_c[i], s, next);
        }
        y[j] = out;
        if (NEXT) u[j] = next;
    }
}

// The new S and y from u = S^T c; and u for the next token, where there is one. The last token asks
// for the state of the head that this thread will probably need next, `heads_ahead` after this one.
template <class E>
inline void update_state(
    const E& e, typename E::T* S, int n, const HeadToken& t, float* u, float* y, const float* next_c,
    size_t heads_ahead) {
    const size_t ahead = heads_ahead * size_t(n) * size_t(n);
    if (next_c)
        update_all<true>(e, S, n, t, u, y, next_c, ahead);
    else
        update_all<false>(e, S, n, t, u, y, nullptr, ahead);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
