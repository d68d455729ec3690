// One token of the recurrence for one head: update and read-out in one pass over S.
//
//   S_f = S_f + S_f decay_f + k_f v        decay is expm1 of the log decay, or null
//   num = sum_f q_f S_f
//
// S is [F][V]. Lanes run over V and the sum over f in order, so bits do not depend on the vector's
// width. Where nothing decays S is double, as in model.ops.recurrence; E is how it is kept (sums.h).
#pragma once

#include "runtime/sums.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

template <class E, int N, bool DECAY, class Decay>
inline void update_read_block(
    const E& e, typename E::T* S, int F_, int V_, const float* q, const float* k, const float* v,
    const Decay* decay, float* num) {
    using V = typename E::V;
    V value[N], acc[N];
    for (int j = 0; j < N; j++) {
        value[j] = E::widen(v + j * V::W);
        acc[j] = V::set(0);
    }
    for (int f = 0; f < F_; f++, S += V_) {
        const V kf = V::set(k[f]), qf = V::set(q[f]);
        const V df = DECAY ? V::set(typename E::Number(decay[f])) : V::set(0);
        for (int j = 0; j < N; j++) {
            V s = e.load(S + j * V::W);
            if (DECAY) s = fma(s, df, s);
            s = fma(kf, value[j], s);
            e.store(s, S + j * V::W);
            acc[j] = fma(qf, s, acc[j]);
        }
    }
    for (int j = 0; j < N; j++) E::narrow(acc[j], num + j * V::W);
}

template <bool DECAY, class E, class Decay>
inline void update_read_all(
    const E& e, typename E::T* S, int F_, int V_, const float* q, const float* k, const float* v,
    const Decay* decay, float* num) {
    using V = typename E::V;
    using Number = typename E::Number;
    constexpr int N = 4;
    int i = 0;
    for (; i + N * V::W <= V_; i += N * V::W)
        update_read_block<E, N, DECAY>(e, S + i, F_, V_, q, k, v + i, decay, num + i);
    for (; i + V::W <= V_; i += V::W)
        update_read_block<E, 1, DECAY>(e, S + i, F_, V_, q, k, v + i, decay, num + i);
    for (; i < V_; i++) {
        Number acc = 0;
        for (int f = 0; f < F_; f++) {
            Number s = e.one(S + size_t(f) * V_ + i);
            if (DECAY) s = fma1(s, Number(decay[f]), s);
            s = fma1(Number(k[f]), Number(v[i]), s);
            e.put(s, S + size_t(f) * V_ + i);
            acc = fma1(Number(q[f]), s, acc);
        }
        num[i] = float(acc);
    }
}

template <class E, class Decay>
inline void update_read(
    const E& e, typename E::T* S, int F_, int V_, const float* q, const float* k, const float* v,
    const Decay* decay, float* num) {
    if (decay)
        update_read_all<true>(e, S, F_, V_, q, k, v, decay, num);
    else
        update_read_all<false>(e, S, F_, V_, q, k, v, decay, num);
}

template <class E, int N, bool STORES>
inline void read_block(
    const E& e, typename E::T* S, int F_, int V_, const float* q, float decay, float* num) {
    using V = typename E::V;
    const V d = V::set(decay);
    V acc[N];
    for (int j = 0; j < N; j++) acc[j] = V::set(0);
    for (int f = 0; f < F_; f++, S += V_) {
        const V qf = V::set(q[f]);
        for (int j = 0; j < N; j++) {
            V s = e.load(S + j * V::W);
            if (decay != 0.0f) {
                s = fma(s, d, s);
                if (STORES) e.store(s, S + j * V::W);
            }
            acc[j] = fma(qf, s, acc[j]);
        }
    }
    for (int j = 0; j < N; j++) E::narrow(acc[j], num + j * V::W);
}

// num = sum_f q_f (S_f + S_f decay), which S becomes where it `STORES`.
template <bool STORES, class E>
inline void read(
    const E& e, typename E::T* S, int F_, int V_, const float* q, float decay, float* num) {
    using V = typename E::V;
    using Number = typename E::Number;
    constexpr int N = 4;
    int i = 0;
    for (; i + N * V::W <= V_; i += N * V::W)
        read_block<E, N, STORES>(e, S + i, F_, V_, q, decay, num + i);
    for (; i + V::W <= V_; i += V::W)
        read_block<E, 1, STORES>(e, S + i, F_, V_, q, decay, num + i);
    for (; i < V_; i++) {
        Number acc = 0;
        for (int f = 0; f < F_; f++) {
            Number s = e.one(S + size_t(f) * V_ + i);
            if (decay != 0.0f) {
                s = fma1(s, Number(decay), s);
                if (STORES) e.put(s, S + size_t(f) * V_ + i);
            }
            acc = fma1(Number(q[f]), s, acc);
        }
        num[i] = float(acc);
    }
}

// How the next token reads S: its k [F], and the decay before it.
struct NextRead {
    const float* k;
    float decay;
};

template <int N, bool DECAY>
inline void update_read_next_block(
    float* S, int F_, int V_, const float* q, const float* k, const float* v, const NextRead& next,
    float* num, float* next_num) {
    const F decay = F::set(next.decay);
    F value[N], acc[N], next_acc[N];
    for (int j = 0; j < N; j++) {
        value[j] = F::load(v + j * F::W);
        acc[j] = next_acc[j] = F::set(0.0f);
    }
    for (int f = 0; f < F_; f++, S += V_) {
        const F kf = F::set(k[f]), qf = F::set(q[f]), nf = F::set(next.k[f]);
        for (int j = 0; j < N; j++) {
            F s = fma(kf, value[j], F::load(S + j * F::W));
            acc[j] = fma(qf, s, acc[j]);
            if (DECAY) s = fma(s, decay, s);
            s.store(S + j * F::W);
            next_acc[j] = fma(nf, s, next_acc[j]);
        }
    }
    for (int j = 0; j < N; j++) {
        acc[j].store(num + j * F::W);
        next_acc[j].store(next_num + j * F::W);
    }
}

template <bool DECAY>
inline void update_read_next_all(
    float* S, int F_, int V_, const float* q, const float* k, const float* v, const NextRead& next,
    float* num, float* next_num) {
    constexpr int N = EVERSTREAM_REGISTERS == 32 ? 4 : 2;
    int i = 0;
    for (; i + N * F::W <= V_; i += N * F::W)
        update_read_next_block<N, DECAY>(S + i, F_, V_, q, k, v + i, next, num + i, next_num + i);
    for (; i + F::W <= V_; i += F::W)
        update_read_next_block<1, DECAY>(S + i, F_, V_, q, k, v + i, next, num + i, next_num + i);
    for (; i < V_; i++) {
        float acc = 0.0f, next_acc = 0.0f;
        for (int f = 0; f < F_; f++) {
            float s = fma1(k[f], v[i], S[size_t(f) * V_ + i]);
            acc = fma1(q[f], s, acc);
            if (DECAY) s = fma1(s, next.decay, s);
            S[size_t(f) * V_ + i] = s;
            next_acc = fma1(next.k[f], s, next_acc);
        }
        num[i] = acc;
        next_num[i] = next_acc;
    }
}

// `update_read` without a decay and then `read` for the next token, in one pass over S.
inline void update_read_next(
    float* S, int F_, int V_, const float* q, const float* k, const float* v, const NextRead& next,
    float* num, float* next_num) {
    if (next.decay != 0.0f)
        update_read_next_all<true>(S, F_, V_, q, k, v, next, num, next_num);
    else
        update_read_next_all<false>(S, F_, V_, q, k, v, next, num, next_num);
}

// z_f += z_f decay_f + k_f; the new z as float in `out`.
inline void update_normalizer(
    double* z, const float* k, const double* decay, int n, float* out) {
    int f = 0;
    for (; f + D::W <= n; f += D::W) {
        D s = D::load(z + f);
        if (decay) s = fma(s, D::load(decay + f), s);
        s = s + D::widen(k + f);
        s.store(z + f);
        s.narrow(out + f);
    }
    for (; f < n; f++) {
        if (decay) z[f] = fma1(z[f], decay[f], z[f]);
        z[f] += double(k[f]);
        out[f] = float(z[f]);
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
