// One token of each mechanism for one head. The definitions are those of model/attention/*.py;
// what stands there as [..., H, F] is one head here.
#pragma once

#include <cmath>

#include "families/block/model.h"
#include "families/block/recurrence.h"
#include "runtime/token_kernels.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

constexpr float EPSILON = 1e-6f;
constexpr float LOG_ZERO = -1e30f;
constexpr float MIN_LOG_DECAY = -5.0f;
constexpr float DECAY_TEMPERATURE = 16.0f;

// Buffers of one thread, each of `room` numbers: the largest of F, 2 K, V, W and their likes.
struct HeadScratch {
    float *q, *k, *v, *a, *b, *c;
    double* d;
};

// What a head reads for one token.
struct Token {
    const float* in;     // q, k, v of all heads, and the gate
    const float* extra;  // decay_down, or beta and decay
    const float* cos;    // [K / 2], where positions are rotated
    const float* sin;
    int64_t position;
};

struct Head {
    const BlockModel& m;
    const Layer& l;
    char* state;
    int h;
    HeadScratch& s;
    const Rounded* rounded;  // how a token rounds the sums; null where they are as computed

    template <class T>
    T* at(size_t offset, size_t stride) const {
        return (T*)(state + offset) + size_t(h) * stride;
    }
    // The head's part of sums from byte `offset` on.
    char* sums(size_t offset) const {
        return state + offset + size_t(h) * m.sum_bytes(size_t(m.sum_count()), m.sum_number());
    }
    // Calls `use(how, S)`: how sums at `at` are kept, and where; E says it of those that are as computed.
    template <class E, class Use>
    void with(char* at, Use use) const {
        if (rounded)
            use(*rounded, (Rounded::T*)at);
        else
            use(E(), (typename E::T*)at);
    }
    template <class E>
    void update_read(
        const float* q, const float* k, const float* v, const typename E::Number* decay,
        float* num) const {
        with<E>(sums(l.state.S), [&](const auto& e, auto* S) {
            EVERSTREAM_LEVEL::update_read(e, S, m.num_features, m.value, q, k, v, decay, num);
        });
    }
    template <class E>
    void read(size_t offset, const float* q, float* num) const {
        with<E>(sums(offset), [&](const auto& e, auto* S) {
            EVERSTREAM_LEVEL::read<false>(e, S, m.num_features, m.value, q, 0.0f, num);
        });
    }
};

// q, k and v after the convolution and a silu (model/attention/base.py).
inline void convolve_heads(const Head& x, const Token& t) {
    const BlockModel& m = x.m;
    float* ring = (float*)(x.state + x.l.state.conv);
    const auto part = [&](int at, int n, float* out) {
        convolve_silu(x.l.conv + at, ring + at, t.in + at, m.conv_size, size_t(m.qkv()), n, out);
    };
    part(x.h * m.key, m.key, x.s.q);
    part((m.num_heads + x.h) * m.key, m.key, x.s.k);
    part(2 * m.num_heads * m.key + x.h * m.value, m.value, x.s.v);
}

// q, k and v of the head into its buffers, convolved where the model has a convolution, rotated if
// that comes before the features, q and k times `by`.
inline void load_heads(const Head& x, const Token& t, float by) {
    const BlockModel& m = x.m;
    const float* in = t.in;
    if (m.conv_size) {
        convolve_heads(x, t);
        if (by != 1.0f) {
            scale(x.s.q, by, m.key);
            scale(x.s.k, by, m.key);
        }
    } else {
        const auto times = [by](F a) { return a * F::set(by); };
        map(x.s.q, in + x.h * m.key, m.key, times);
        map(x.s.k, in + (m.num_heads + x.h) * m.key, m.key, times);
        std::memcpy(x.s.v, in + 2 * m.num_heads * m.key + x.h * m.value, size_t(m.value) * 4);
    }
    if (m.rotary == Rotary::before) {
        rotate(x.s.q, t.cos, t.sin, m.key / 2);
        rotate(x.s.k, t.cos, t.sin, m.key / 2);
    }
}

inline float half_square(const float* x, int n) { return 0.5f * sum_of_squares(x, n); }

inline void divide(float* o, float by, int n) {
    const F d = F::set(by);
    map(o, o, n, [d](F a) { return a / d; });
}

// Positive features over one denominator (model/attention/linear.py).

inline void positive_features(Mechanism mechanism, const float* x, float* out, int n) {
    const F zero = F::set(0.0f), one = F::set(1.0f);
    switch (mechanism) {
        case Mechanism::elu:
            map(out, x, n, [&](F a) { return select_less(zero, a, a + one, exp(min(zero, a))); });
            break;
        case Mechanism::relu: map(out, x, n, [&](F a) { return max(zero, a); }); break;
        case Mechanism::softmax_map:
            std::memcpy(out, x, size_t(n) * 4);
            softmax(out, n);
            break;
        default:  // cosine
            out[0] = 1.0f;
            l2_normalize(out + 1, x, n, EPSILON);
    }
}

inline void linear_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const int n = m.num_features;
    float *q = x.s.a, *k = x.s.b;
    load_heads(x, t, 1.0f);
    positive_features(m.mechanism, x.s.q, q, m.key);
    positive_features(m.mechanism, x.s.k, k, m.key);
    update_normalizer(x.at<double>(x.l.state.z, n), k, nullptr, n, x.s.c);
    float den = dot(q, x.s.c, n);
    den = m.mechanism == Mechanism::elu ? den + EPSILON : std::fmax(den, EPSILON);
    if (m.rotary == Rotary::after) {
        rotate(q, t.cos, t.sin, n / 2);
        rotate(k, t.cos, t.sin, n / 2);
    }
    x.update_read<Double>(q, k, x.s.v, nullptr, o);
    divide(o, den, m.value);
}

// Exponential features, relative to a running maximum (model/ops/exponential.py).

// From log features in `log_k`: the key's features relative to the new maximum, in place, and
// expm1 of the log decay that its rise implies. False where no maximum rose over an old one.
inline bool enter_maximum(float* log_k, const double* z, float* maximum, double* decay, int n) {
    bool decays = false;
    for (int f = 0; f < n; f++) {
        const float before = z[f] > 0 ? maximum[f] : LOG_ZERO;
        const float after = log_k[f] > before ? log_k[f] : before;
        const float log_decay = before > LOG_ZERO ? before - after : 0.0f;
        decay[f] = log_decay < 0 ? std::expm1(double(log_decay)) : 0.0;
        decays = decays || log_decay < 0;
        maximum[f] = after;
        log_k[f] -= after;
    }
    const F zero = F::set(0.0f);
    map(log_k, log_k, n, [zero](F a) { return exp(min(zero, a)); });
    return decays;
}

// exp(log_q + maximum) relative to its largest feature, in place; the logarithm of that.
inline float scale_query(float* log_q, const float* maximum, int n) {
    map(log_q, log_q, maximum, n, [](F a, F b) { return a + b; });
    const float top = largest(log_q, n);
    const F by = F::set(top);
    map(log_q, log_q, n, [by](F a) { return exp(a - by); });
    return top;
}

inline void log_softmax(float* x, int n, float* room) {
    std::memcpy(room, x, size_t(n) * 4);
    const float top = largest(x, n), total = exp_relative(room, top, n);
    const F by = F::set(top + std::log(total));
    map(x, x, n, [by](F a) { return a - by; });
}

// Log features of q and k, already scaled, from s.q, s.k into s.a, s.b.
inline void exponential_features(const Head& x) {
    const BlockModel& m = x.m;
    const int n = m.num_features;
    const float* w = x.l.features + size_t(x.h) * m.key * n;
    project(x.s.a, x.s.q, w, nullptr, m.key, n);
    project(x.s.b, x.s.k, w, nullptr, m.key, n);
    if (m.mechanism == Mechanism::performer || m.mechanism == Mechanism::rbf) {
        const float times = m.mechanism == Mechanism::rbf ? 2.0f : 1.0f;
        const F by = F::set(times * half_square(x.s.k, m.key));
        map(x.s.b, x.s.b, n, [by](F a) { return a - by; });
    } else {
        const F beta = F::set(m.beta);
        map(x.s.b, x.s.b, x.l.feature_bias + size_t(x.h) * n, n,
            [beta](F a, F b) { return fma(beta, a, b); });
        log_softmax(x.s.b, n, x.s.c);
    }
}

// Feeds log features s.b of a key with value `v`.
struct Far {
    float scale, den;
};
inline Far exponential_update_read(const Head& x, float* log_q, float* log_k, const float* v, float* num) {
    const BlockModel& m = x.m;
    const int n = m.num_features;
    double* z = x.at<double>(x.l.state.z, n);
    float* maximum = x.at<float>(x.l.state.max, n);
    const double* decay = enter_maximum(log_k, z, maximum, x.s.d, n) ? x.s.d : nullptr;
    const float scale = scale_query(log_q, maximum, n);
    update_normalizer(z, log_k, decay, n, x.s.c);
    const float den = dot(log_q, x.s.c, n);
    x.update_read<Double>(log_q, log_k, v, decay, num);
    return {scale, den};
}

inline float key_scale(const BlockModel& m) { return float(std::pow(double(m.value), -0.25)); }

inline void exponential_token(const Head& x, const Token& t, float* o) {
    // Rotation and scaling commute up to rounding; the reference rotates first.
    load_heads(x, t, key_scale(x.m));
    exponential_features(x);
    const Far far = exponential_update_read(x, x.s.a, x.s.b, x.s.v, o);
    divide(o, far.den, x.m.value);
}

inline void efficient_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const int n = m.key;
    load_heads(x, t, 1.0f);
    double* z = x.at<double>(x.l.state.z, n);
    float* maximum = x.at<float>(x.l.state.max, n);
    const double* decay = enter_maximum(x.s.k, z, maximum, x.s.d, n) ? x.s.d : nullptr;
    update_normalizer(z, x.s.k, decay, n, x.s.c);
    softmax(x.s.q, n);
    map(x.s.q, x.s.q, x.s.c, n, [](F a, F b) { return a / b; });
    x.update_read<Double>(x.s.q, x.s.k, x.s.v, decay, o);
}

// A window of exact weights and sums of what left it, under one denominator (model/ops/window.py).

// Drops the oldest of W rows of `width` numbers that are `stride` apart and appends `x`.
template <class T>
inline void shift_in(T* ring, int window, size_t stride, const T* x, int width) {
    for (int i = 0; i + 1 < window; i++)
        std::memcpy(ring + i * stride, ring + (i + 1) * stride, size_t(width) * sizeof(T));
    std::memcpy(ring + (window - 1) * stride, x, size_t(width) * sizeof(T));
}

// Scores in s.c [W], of which the last `seen` count: num into `num`, den and scale returned.
inline Far window_read(const Head& x, const float* ring_v, int seen, float* num) {
    const BlockModel& m = x.m;
    float* weights = x.s.c + (m.window - seen);
    const size_t stride = size_t(m.num_heads) * m.value;
    const float top = largest(weights, seen), den = exp_relative(weights, top, seen);
    std::memset(num, 0, size_t(m.value) * 4);
    for (int i = 0; i < seen; i++) {
        const F w = F::set(weights[i]);
        map(num, ring_v + size_t(m.window - seen + i) * stride, num, m.value,
            [w](F a, F sum) { return fma(w, a, sum); });
    }
    return {top, den};
}

inline void join(float* near, Far a, const float* far, Far b, int n) {
    const float scale = std::fmax(a.scale, b.scale);
    const float by_a = std::exp(a.scale - scale), by_b = std::exp(b.scale - scale);
    const F wa = F::set(by_a), wb = F::set(by_b);
    const F den = F::set(fma1(a.den, by_a, b.den * by_b));
    map(near, near, far, n, [&](F x, F y) { return fma(x, wa, y * wb) / den; });
}

inline int tokens_seen(const BlockModel& m, const Token& t) {
    return t.position + 1 < m.window ? int(t.position + 1) : m.window;
}

inline void window_linear_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const int n = m.num_features, K = m.key;
    const size_t k_stride = size_t(m.num_heads) * K, v_stride = size_t(m.num_heads) * m.value;
    float *ring_k = x.at<float>(x.l.state.k, K), *ring_v = x.at<float>(x.l.state.v, m.value);
    const float *w = x.l.features + size_t(x.h) * K * n, half_log = 0.5f * std::log(float(n));
    const auto log_features = [&](const float* from, float* to) {
        project(to, from, w, nullptr, K, n);
        const F by = F::set(half_square(from, K) + half_log);
        map(to, to, n, [by](F a) { return a - by; });
    };
    load_heads(x, t, key_scale(m));
    const bool leaves = t.position >= m.window;
    float* far_num = x.s.b;
    Far far{LOG_ZERO, 0.0f};
    if (leaves) {
        log_features(x.s.q, x.s.a);
        log_features(ring_k, x.s.b);
        far = exponential_update_read(x, x.s.a, x.s.b, ring_v, o);
        std::memcpy(far_num, o, size_t(m.value) * 4);
    }
    shift_in(ring_k, m.window, k_stride, x.s.k, K);
    shift_in(ring_v, m.window, v_stride, x.s.v, m.value);
    const int seen = tokens_seen(m, t);
    for (int i = m.window - seen; i < m.window; i++) x.s.c[i] = dot(x.s.q, ring_k + i * k_stride, K);
    const Far near = window_read(x, ring_v, seen, o);
    if (leaves)
        join(o, near, far_num, far, m.value);
    else
        divide(o, near.den, m.value);
}

// Whether every code of a window is one of `num`. A state that comes from outside may hold anything.
inline bool codes_are_sound(const int64_t* codes, int window, size_t stride, int num) {
    bool sound = true;
    for (int i = 0; i < window; i++) {
        const int64_t code = codes[size_t(i) * stride];
        sound = sound && code >= 0 && code < num;
    }
    return sound;
}

inline void vq_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const int C = m.num_features, K = m.key;
    const float* book = x.l.features + size_t(x.h) * K * C;
    const float* book_bias = x.l.feature_bias + size_t(x.h) * C;
    int64_t *codes = x.at<int64_t>(x.l.state.code, 1), *count = x.at<int64_t>(x.l.state.count, C);
    float* ring_v = x.at<float>(x.l.state.v, m.value);
    const size_t v_stride = size_t(m.num_heads) * m.value;
    if (!codes_are_sound(codes, m.window, size_t(m.num_heads), C)) {
        for (int i = 0; i < m.value; i++) o[i] = NAN;
        return;
    }
    load_heads(x, t, key_scale(m));
    float *log_q = x.s.a, *closeness = x.s.b;
    project(log_q, x.s.q, book, nullptr, K, C);
    project(closeness, x.s.k, book, book_bias, K, C);
    int64_t code = 0;
    for (int c = 1; c < C; c++)
        if (closeness[c] > closeness[code]) code = c;
    const bool leaves = t.position >= m.window;
    if (leaves) {
        const int64_t old = codes[0];
        count[old] = int64_t(uint64_t(count[old]) + 1);  // a count from outside may overflow
        x.with<Double>(x.sums(x.l.state.S), [&](const auto& e, auto* S) {
            auto* row = S + size_t(old) * m.value;
            for (int i = 0; i < m.value; i++) e.put(e.one(row + i) + ring_v[i], row + i);
        });
    }
    shift_in(codes, m.window, size_t(m.num_heads), &code, 1);
    shift_in(ring_v, m.window, v_stride, x.s.v, m.value);
    const int seen = tokens_seen(m, t);
    const float* bias = x.l.window_bias + size_t(x.h) * m.window;
    for (int i = m.window - seen; i < m.window; i++)
        x.s.c[i] = log_q[codes[size_t(i) * m.num_heads]] + bias[m.window - 1 - i];
    const Far near = window_read(x, ring_v, seen, o);
    if (!leaves) return divide(o, near.den, m.value);
    for (int c = 0; c < C; c++)
        if (count[c] == 0) log_q[c] = LOG_ZERO;
    Far far;
    far.scale = largest(log_q, C);
    const F by = F::set(far.scale);
    map(log_q, log_q, C, [by](F a) { return exp(a - by); });
    for (int c = 0; c < C; c++) x.s.c[c] = count[c] < 0 ? NAN : float(count[c]);
    far.den = dot(log_q, x.s.c, C);
    x.read<Double>(x.l.state.S, log_q, x.s.b);
    join(o, near, x.s.b, far, m.value);
}

// cosFormer: two epochs of features with a cosine and a sine (model/attention/cosformer.py).
inline void cosformer_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const int K = m.key, n = 2 * K, V = m.value;
    float *z = x.at<float>(x.l.state.z, n), *z_before = x.at<float>(x.l.state.z_before, n);
    load_heads(x, t, 1.0f);
    const int64_t last_seen = t.position > 0 ? t.position - 1 : 0;
    if (t.position / m.epoch > last_seen / m.epoch) {
        char *S = x.sums(x.l.state.S), *S_before = x.sums(x.l.state.S_before);
        const size_t bytes = m.sum_bytes(size_t(m.sum_count()));
        std::memcpy(S_before, S, bytes);
        std::memcpy(z_before, z, size_t(n) * 4);
        std::memset(S, 0, bytes);
        std::memset(z, 0, size_t(n) * 4);
    }
    const double angle = double(t.position % (8 * m.epoch)) * (M_PI / 4 / double(m.epoch));
    const F cosine = F::set(float(std::cos(angle))), sine = F::set(float(std::sin(angle)));
    const F zero = F::set(0.0f);
    const auto features = [&](const float* from, float* to) {
        map(to, from, K, [&](F a) { return max(zero, a) * cosine; });
        map(to + K, from, K, [&](F a) { return max(zero, a) * sine; });
    };
    features(x.s.q, x.s.a);
    features(x.s.k, x.s.b);
    map(z, z, x.s.b, n, [](F a, F b) { return a + b; });
    const float den = dot(x.s.a, z, n) + dot(x.s.a, z_before, n);
    x.update_read<Single>(x.s.a, x.s.b, x.s.v, nullptr, o);
    x.read<Single>(x.l.state.S_before, x.s.a, x.s.c);
    map(o, o, x.s.c, V, [](F a, F b) { return a + b; });
    divide(o, std::fmax(den, EPSILON), V);
}

// A norm instead of a denominator; see `head_output`.

inline float root(int n) { return float(1.0 / std::sqrt(double(n))); }

inline void normed_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const int K = m.key;
    const F zero = F::set(0.0f);
    load_heads(x, t, 1.0f);
    if (m.map == FeatureMap::product) {
        const auto product = [&](float* y, const float* w, const float* bias) {
            project(x.s.a, y, w, bias, K, 2 * K);
            map(y, x.s.a, x.s.a + K, K, [](F a, F b) { return a * b; });
        };
        product(x.s.q, x.l.q_map, x.l.q_map_bias);
        product(x.s.k, x.l.k_map, x.l.k_map_bias);
    } else if (m.map == FeatureMap::elu) {
        positive_features(Mechanism::elu, x.s.q, x.s.q, K);
        positive_features(Mechanism::elu, x.s.k, x.s.k, K);
    } else if (m.map == FeatureMap::relu) {
        map(x.s.q, x.s.q, K, [&](F a) { return max(zero, a); });
        map(x.s.k, x.s.k, K, [&](F a) { return max(zero, a); });
    }
    scale(x.s.q, root(K), K);
    x.update_read<Double>(x.s.q, x.s.k, x.s.v, nullptr, o);
}

inline void retnet_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    load_heads(x, t, 1.0f);
    scale(x.s.q, root(m.key), m.key);
    x.update_read<Single>(x.s.q, x.s.k, x.s.v, x.l.decay + x.h * m.key, o);
}

inline void dijiang_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const int K = m.key;
    const float* w = x.l.features + size_t(x.h) * K * K;
    load_heads(x, t, 1.0f);
    project(x.s.a, x.s.q, w, nullptr, K, K);
    project(x.s.b, x.s.k, w, nullptr, K, K);
    softmax(x.s.a, K);
    softmax(x.s.b, K);
    x.update_read<Single>(x.s.a, x.s.b, x.s.v, x.l.decay + x.h * K, o);
}

inline void gated_token(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const int K = m.key;
    load_heads(x, t, 1.0f);
    scale(x.s.q, root(K), K);
    project(
        x.s.a, t.extra, x.l.decay_up + size_t(x.h) * m.rank * K, x.l.decay_bias + x.h * K, m.rank, K);
    const F temperature = F::set(DECAY_TEMPERATURE), low = F::set(MIN_LOG_DECAY);
    map(x.s.a, x.s.a, K, [&](F a) { return expm1(max(low, log_sigmoid(a) / temperature)); });
    x.update_read<Single>(x.s.q, x.s.k, x.s.v, x.s.a, o);
}

inline void mix(const Head& x, const Token& t, float* o) {
    switch (x.m.mechanism) {
        case Mechanism::elu:
        case Mechanism::relu:
        case Mechanism::softmax_map:
        case Mechanism::cosine: return linear_token(x, t, o);
        case Mechanism::performer:
        case Mechanism::performer_simplified:
        case Mechanism::rbf:
        case Mechanism::soft_vq: return exponential_token(x, t, o);
        case Mechanism::efficient: return efficient_token(x, t, o);
        case Mechanism::window_linear: return window_linear_token(x, t, o);
        case Mechanism::vq: return vq_token(x, t, o);
        case Mechanism::cosformer: return cosformer_token(x, t, o);
        case Mechanism::normed: return normed_token(x, t, o);
        case Mechanism::retnet: return retnet_token(x, t, o);
        case Mechanism::dijiang: return dijiang_token(x, t, o);
        case Mechanism::gated: return gated_token(x, t, o);
        case Mechanism::delta: break;  // see attend_delta
    }
}

// The norm of a head and the gate, where there are (`_merge` in model/attention/base.py).
inline void head_output(const Head& x, const Token& t, float* o) {
    const BlockModel& m = x.m;
    const float* gate = t.in + m.qkv() + x.h * m.value;
    if (x.l.norm_weight) {
        if (m.mechanism == Mechanism::dijiang) center(o, m.value);
        if (m.gated) return gated_norm(o, x.l.norm_weight, gate, m.eps, m.value);
        return rms_norm(o, x.l.norm_weight, m.eps, m.value);
    }
    if (m.gated) map(o, o, gate, m.value, [](F a, F g) { return a * silu(g); });
}

inline void attend(const Head& x, const Token& t, float* o) {
    mix(x, t, o);
    head_output(x, t, o);
}

// The delta rule (model/attention/delta.py).

struct DeltaRates {
    float beta, decay;
};

// A token's q, k and v into the head's buffers, and how much it writes and keeps.
inline DeltaRates load_delta(const Head& x, const Token& t) {
    const BlockModel& m = x.m;
    const int K = m.key;
    load_heads(x, t, 1.0f);
    scale(x.s.q, inverse_length(x.s.q, K) * root(K), K);
    scale(x.s.k, inverse_length(x.s.k, K), K);
    const float beta = m.max_beta / (1.0f + std::exp(-t.extra[x.h]));
    if (!x.l.decay_rate) return {beta, 0.0f};
    const double a = double(t.extra[m.num_heads + x.h]) + x.l.decay_bias[x.h];
    return {beta, softplus_decay(a, x.l.decay_rate[x.h])};
}

// One token where S is rounded after each.
inline void delta_token(const Head& x, const Token& t, float* o) {
    const int K = x.m.key, V = x.m.value;
    auto* S = (Rounded::T*)x.sums(x.l.state.S);
    float *old = (float*)x.s.d, *decay = x.s.a;
    const DeltaRates rates = load_delta(x, t);
    read<false>(*x.rounded, S, K, V, x.s.k, rates.decay, old);
    const F beta = F::set(rates.beta);
    map(x.s.v, x.s.v, old, V, [beta](F v, F u) { return beta * (v - u); });
    for (int f = 0; f < K; f++) decay[f] = rates.decay;
    update_read(
        *x.rounded, S, K, V, x.s.q, x.s.k, x.s.v, rates.decay != 0.0f ? decay : nullptr, o);
    head_output(x, t, o);
}

// `num` tokens, at least one, `token(i)` each with its output `out(i)`. One pass writes S for a token
// and reads it for the next one.
template <class TokenOf, class Out>
inline void attend_delta(const Head& x, int num, TokenOf token, Out out) {
    const int K = x.m.key, V = x.m.value;
    float *S = (float*)x.sums(x.l.state.S), *old = (float*)x.s.d;
    HeadScratch here = x.s, there = x.s;
    there.q = x.s.a, there.k = x.s.b, there.v = x.s.c;
    DeltaRates rates = load_delta({x.m, x.l, x.state, x.h, here, nullptr}, token(0));
    read<true>(Single(), S, K, V, here.k, rates.decay, old);
    for (int i = 0; i < num; i++) {
        const F beta = F::set(rates.beta);
        map(here.v, here.v, old, V, [beta](F v, F u) { return beta * (v - u); });
        if (i + 1 < num) {
            rates = load_delta({x.m, x.l, x.state, x.h, there, nullptr}, token(i + 1));
            const NextRead next{there.k, rates.decay};
            update_read_next(S, K, V, here.q, here.k, here.v, next, out(i), old);
        } else {
            update_read(Single(), S, K, V, here.q, here.k, here.v, (const float*)nullptr, out(i));
        }
        head_output(x, token(i), out(i));
        const HeadScratch done = here;
        here = there, there = done;
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
