// What a layer keeps of the tokens that left its window; model/families/llama/network.py and
// delta.py have the equations. All of one key head and its queries; sums over channels and over
// features go in order, so that bits do not depend on the vector's width.
#pragma once

#include <type_traits>

#include "families/bounded/model.h"
#include "families/qwen35/gated_delta.h"
#include "runtime/token_kernels.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// y[n] = sum_i x_i W_i, with W [num][n], kept as E says (sums.h).
template <class E>
inline void add_rows(
    const E& e, float* y, const float* x, const typename E::T* W, int num, int n) {
    int at = 0;
    const auto add = [&](auto vectors) {
        constexpr int J = decltype(vectors)::value;
        for (; at + J * F::W <= n; at += J * F::W) {
            F sum[J];
            for (F& part : sum) part = F::set(0.0f);
            for (int i = 0; i < num; i++) {
                const F by = F::set(x[i]);
                for (int j = 0; j < J; j++)
                    sum[j] = fma(by, e.load(W + size_t(i) * n + at + j * F::W), sum[j]);
            }
            for (int j = 0; j < J; j++) sum[j].store(y + at + j * F::W);
        }
    };
    add(std::integral_constant<int, 4>());
    add(std::integral_constant<int, 1>());
    for (; at < n; at++) {
        float sum = 0.0f;
        for (int i = 0; i < num; i++) sum = fma1(x[i], e.one(W + size_t(i) * n + at), sum);
        y[at] = sum;
    }
}

// The features [M] of x [n] by a map [n][M / 2]: softmax([x map, -x map]), of unit length for the
// delta rule.
inline void far_features(const FarPart& far, const float* map, const float* x, int n, float* out) {
    const int half = far.features / 2;
    add_rows(Single(), out, x, map, n, half);
    for (int i = 0; i < half; i++) out[half + i] = -out[i];
    softmax(out, far.features);
    if (far.kind == FarPart::delta) l2_normalize(out, out, far.features, 1e-12f);
}

// What a query's far part weighs next to the near sum; q is not rotated.
inline float far_weight(const FarPart& far, int head, const float* q, int n) {
    return exp1(dot(far.scale + size_t(head) * n, q, n) + far.bias[head]);
}

// A token's key and value [n] as they leave the window, and room for its features [M].
struct Leaving {
    float *k, *v, *features;
};

// S [M][n] += features v^T, z [M] += features.
template <class E>
inline void add_relative(
    const E& e, typename E::T* S, float* z, const Leaving& t, int M, int n) {
    for (int i = 0; i < M; i++) {
        const F by = F::set(t.features[i]);
        auto* row = S + size_t(i) * n;
        for (int at = 0; at < n; at += F::W) {
            const F v = load_lanes(Single(), t.v + at, n - at);
            store_lanes(e, row + at, n - at, fma(by, v, load_lanes(e, row + at, n - at)));
        }
        z[i] += t.features[i];
    }
}

// The gated delta rule for one token; `read` [n] is of no further use.
template <class E>
inline void add_delta(
    const E& e, const FarPart& far, int kv, typename E::T* S, const Leaving& t, float* read,
    int n) {
    float logits[2];
    for (int j = 0; j < 2; j++) {
        const float* gate = far.gates + size_t(kv * 2 + j) * 2 * n;
        logits[j] = dot(gate, t.k, n) + dot(gate + n, t.v, n) + far.gate_bias[kv * 2 + j];
    }
    DeltaToken token;
    token.q = token.k = t.features;
    token.v = t.v;
    token.y = read;
    token.beta = 1.0f / (1.0f + std::exp(-logits[0]));
    token.decay = -1.0f / (1.0f + std::exp(logits[1]));  // sigmoid - 1
    delta_rule(e, S, far.features, n, &token, 1);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
