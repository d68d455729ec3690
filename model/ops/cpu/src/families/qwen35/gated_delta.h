// The gated delta rule of one value head (Yang et al. 2024, "Gated Delta Networks", arXiv
// 2412.06464), for tokens in order:
//
//   u = S^T k;  d = beta (v - u - u decay);  S = S + S decay + k d^T;  y = S^T q
//
// S is [K][V], kept as E says (sums.h); decay is expm1 of the log decay. Lanes run over V and sums over K in order, so bits
// do not depend on the vector's width. A column of S needs no other one: of several tokens, some
// columns go through all and stay in the nearest cache meanwhile; one pass writes S for a token and
// reads it for the next one. A single token takes whole rows, in the order in which they lie in
// memory. What is added in which order does not depend on any of that.
#pragma once

#include "runtime/sums.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// What a token brings to a head: q and k [K], v [V]; y [V] may be v.
struct DeltaToken {
    const float *q, *k, *v;
    float* y;
    float decay, beta;
};

// d of some columns of a token.
inline F delta_of(const DeltaToken& t, F v, F u) {
    return F::set(t.beta) * (v - fma(u, F::set(t.decay), u));
}

template <int J, bool NEXT, class E>
inline void delta_step(
    const E& e, typename E::T* S, int K, int V, const DeltaToken& t, int column, F (&u)[J]) {
    const float* next_k = NEXT ? (&t + 1)->k : nullptr;
    const F decay = F::set(t.decay);
    F d[J], out[J];
    for (int j = 0; j < J; j++) {
        d[j] = delta_of(t, F::load(t.v + column + j * F::W), u[j]);
        u[j] = out[j] = F::set(0.0f);
    }
    for (int i = 0; i < K; i++, S += V) {
        const F k = F::set(t.k[i]), q = F::set(t.q[i]), next = F::set(NEXT ? next_k[i] : 0.0f);
        for (int j = 0; j < J; j++) {
            F x = e.load(S + j * F::W);
            x = fma(x, decay, x);
            x = fma(k, d[j], x);
            e.store(x, S + j * F::W);
            out[j] = fma(q, x, out[j]);
            if (NEXT) u[j] = fma(next, x, u[j]);
        }
    }
    for (int j = 0; j < J; j++) out[j].store(t.y + column + j * F::W);
}

template <int J, class E>
inline void delta_columns(
    const E& e, typename E::T* S, int K, int V, const DeltaToken* tokens, int num, int column) {
    S += column;
    F u[J];
    for (F& sum : u) sum = F::set(0.0f);
    for (int i = 0; i < K; i++) {
        const F k = F::set(tokens[0].k[i]);
        for (int j = 0; j < J; j++) u[j] = fma(k, e.load(S + size_t(i) * V + j * F::W), u[j]);
    }
    for (int t = 0; t + 1 < num; t++) delta_step<J, true>(e, S, K, V, tokens[t], column, u);
    delta_step<J, false>(e, S, K, V, tokens[num - 1], column, u);
}

// One column without vectors.
template <class E>
inline void delta_column(
    const E& e, typename E::T* S, int K, int V, const DeltaToken* tokens, int num, int column) {
    for (int t = 0; t < num; t++) {
        const DeltaToken& token = tokens[t];
        float u = 0.0f, out = 0.0f;
        for (int i = 0; i < K; i++) u = fma1(token.k[i], e.one(S + size_t(i) * V + column), u);
        const float d = token.beta * (token.v[column] - fma1(u, token.decay, u));
        for (int i = 0; i < K; i++) {
            float s = e.one(S + size_t(i) * V + column);
            s = fma1(s, token.decay, s);
            s = fma1(token.k[i], d, s);
            e.put(s, S + size_t(i) * V + column);
            out = fma1(token.q[i], s, out);
        }
        token.y[column] = out;
    }
}

// `num` tokens through a head, at least one; where S is rounded, one.
template <class E>
inline void delta_rule(const E& e, typename E::T* S, int K, int V, const DeltaToken* tokens, int num) {
    constexpr int J = EVERSTREAM_REGISTERS == 32 ? 4 : 2;
    int column = 0;
    for (; num == 1 && column + 2 * J * F::W <= V; column += 2 * J * F::W)
        delta_columns<2 * J>(e, S, K, V, tokens, num, column);
    for (; column + J * F::W <= V; column += J * F::W)
        delta_columns<J>(e, S, K, V, tokens, num, column);
    for (; column + F::W <= V; column += F::W) delta_columns<1>(e, S, K, V, tokens, num, column);
    for (; column < V; column++) delta_column(e, S, K, V, tokens, num, column);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
