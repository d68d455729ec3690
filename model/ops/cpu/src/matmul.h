// y = x W^T for packed W. Each output is summed over k in order from 0, in one accumulator, so
// its bits depend neither on how many rows share a call nor on how the work is divided.
//
// bfloat16: the weights are widened and x stays float32, except at the level with bfloat16 dot
// products, which rounds x to bfloat16. int8: x is rounded to int8 with one scale per row; the
// integer sums are exact.
#pragma once

#include <cmath>
#include <type_traits>

#include "model.h"
#include "numeric.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define EVERSTREAM_DOT 1
#else
#define EVERSTREAM_DOT 0
#endif

namespace everstream {
namespace EVERSTREAM_LEVEL {

// A tile of ROWS x NV vectors of accumulators leaves registers for NV weights and one input.
constexpr int NV = EVERSTREAM_REGISTERS == 32 ? 4 : 2;
constexpr int PANEL = NV * F::W;
constexpr int ROWS = 6;
// Rows of one task, and the part of k whose widened weights stay in the cache.
constexpr int TASK_ROWS = 64;
constexpr int BLOCK_K = 256;

constexpr int padded(int n, int to) { return (n + to - 1) / to * to; }

// Bytes per four inputs of an int8 row: bytes, or 16-bit numbers in the order 0 2 1 3.
constexpr int QUAD_BYTES = EVERSTREAM_DOT ? 4 : 8;

// The rows of x in the form that the precision needs; [rows][stride], padded with zeros.
struct Input {
    const float* f = nullptr;
    int stride = 0;
    uint16_t* half = nullptr;  // bfloat16, where EVERSTREAM_DOT
    uint8_t* quads = nullptr;  // int8
    float* scale = nullptr;    // of each int8 row
};

inline bool needs_preparation(Precision p) {
    return p == Precision::int8 || (EVERSTREAM_DOT && p == Precision::bfloat16);
}

inline uint16_t to_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 64);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline void quantize_row(const Input& x, int row, int k) {
    const float* f = x.f + size_t(row) * x.stride;
    const float size = largest_size(f, k);
    // A row that is not finite must not look finite afterwards.
    const float finite = sum_of(f, k, [](F a, F s) { return fma(a, F::set(0.0f), s); });
    x.scale[row] = size / 127.0f + finite;
    const F inverse = F::set(size > 0.0f ? 127.0f / size : 0.0f);
    const F low = F::set(-127.0f), high = F::set(127.0f), magic = F::set(12582912.0f);
    uint8_t* q = x.quads + size_t(row) * (x.stride / 4) * QUAD_BYTES;
    for (int i = 0; i < padded(k, 4); i += 16) {
        float t[16] = {};
        const int n = k - i < 16 ? k - i : 16;
        std::memcpy(t, f + i, size_t(n) * 4);
        uint32_t bits[16];  // whose low half is the rounded number
        for (int j = 0; j < 16; j += F::W) {
            const F scaled = min(max(F::load(t + j) * inverse, low), high) + magic;
            scaled.store(t + j);
        }
        std::memcpy(bits, t, sizeof bits);
        for (int j = 0; j < 16 && i + j < padded(k, 4); j += 4, q += QUAD_BYTES) {
            if (EVERSTREAM_DOT) {
                for (int c = 0; c < 4; c++) q[c] = uint8_t(bits[j + c] + 128);
            } else {
                const uint16_t pairs[4] = {
                    uint16_t(bits[j]), uint16_t(bits[j + 2]), uint16_t(bits[j + 1]),
                    uint16_t(bits[j + 3])};
                std::memcpy(q, pairs, 8);
            }
        }
    }
}

// Fills what `needs_preparation` asks for, for one row.
inline void prepare_row(Precision p, const Input& x, int row, int k) {
    if (p == Precision::int8) {
        quantize_row(x, row, k);
    } else {
        const float* f = x.f + size_t(row) * x.stride;
        uint16_t* h = x.half + size_t(row) * x.stride;
        for (int i = 0; i < k; i++) h[i] = to_bf16(f[i]);
        if (k % 2) h[k] = 0;
    }
}

// tmp [ROWS][PANEL] (+)= x w, over `k` inputs of MR rows.
template <int MR>
inline void tile_float(const float* x, int stride, const float* w, int k, float* tmp, bool first) {
    F acc[MR][NV];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < NV; j++)
            acc[r][j] = first ? F::set(0.0f) : F::load(tmp + r * PANEL + j * F::W);
    for (int i = 0; i < k; i++, w += PANEL) {
        F wv[NV];
        for (int j = 0; j < NV; j++) wv[j] = F::load(w + j * F::W);
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i]);
            for (int j = 0; j < NV; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < NV; j++) acc[r][j].store(tmp + r * PANEL + j * F::W);
}

// The same for bfloat16 pairs, widened on the way: for few rows.
template <int MR>
inline void tile_bf16(const float* x, int stride, const uint16_t* w, int k, float* tmp) {
    F acc[MR][NV];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < NV; j++) acc[r][j] = F::set(0.0f);
    for (int i = 0; i < k; i += 2, w += 2 * PANEL) {
        __builtin_prefetch((const char*)w + 1024);
        if (PANEL >= 64) {
            __builtin_prefetch((const char*)w + 1088);
            __builtin_prefetch((const char*)w + 1152);
            __builtin_prefetch((const char*)w + 1216);
        }
        F wv[NV];
        for (int j = 0; j < NV; j++) wv[j] = F::even(w + j * 2 * F::W);
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i]);
            for (int j = 0; j < NV; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
        for (int j = 0; j < NV; j++) wv[j] = F::odd(w + j * 2 * F::W);
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i + 1]);
            for (int j = 0; j < NV; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < NV; j++) acc[r][j].store(tmp + r * PANEL + j * F::W);
}

#if EVERSTREAM_DOT
template <int MR>
inline void tile_dot(const uint16_t* x, int stride, const uint16_t* w, int k, float* tmp) {
    __m512 acc[MR][NV];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < NV; j++) acc[r][j] = _mm512_setzero_ps();
    for (int i = 0; i < k; i += 2, w += 2 * PANEL) {
        __m512bh wv[NV];
        for (int j = 0; j < NV; j++) wv[j] = (__m512bh)_mm512_loadu_si512(w + j * 32);
        for (int r = 0; r < MR; r++) {
            int32_t pair;
            std::memcpy(&pair, x + size_t(r) * stride + i, 4);
            const __m512bh xv = (__m512bh)_mm512_set1_epi32(pair);
            for (int j = 0; j < NV; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], wv[j], xv);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < NV; j++) _mm512_storeu_ps(tmp + r * PANEL + j * 16, acc[r][j]);
}
#endif

template <int MR>
inline void tile_int8(
    const uint8_t* x, size_t stride, const float* x_scale, const int8_t* w, int k,
    const float* scale, const int32_t* sums, float* tmp) {
    I acc[MR][NV];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < NV; j++) acc[r][j] = I::zero();
    for (int i = 0; i < k; i += 4, w += 4 * PANEL, x += QUAD_BYTES) {
        __builtin_prefetch((const char*)w + 1024);
        if (PANEL >= 64) {
            __builtin_prefetch((const char*)w + 1088);
            __builtin_prefetch((const char*)w + 1152);
            __builtin_prefetch((const char*)w + 1216);
        }
#if EVERSTREAM_DOT
        for (int j = 0; j < NV; j++) {
            const I wv = I::load(w + j * 4 * F::W);
            for (int r = 0; r < MR; r++)
                acc[r][j].v = _mm512_dpbusd_epi32(acc[r][j].v, I::spread(x + r * stride).v, wv.v);
        }
#else
        for (int j = 0; j < NV; j += 2) {  // two vectors at a time, for want of registers
            const I a = I::load(w + j * 4 * F::W), b = I::load(w + (j + 1) * 4 * F::W);
            const I a_even = a.even_bytes(), a_odd = a.odd_bytes();
            const I b_even = b.even_bytes(), b_odd = b.odd_bytes();
            for (int r = 0; r < MR; r++) {
                const I even = I::spread(x + r * stride), odd = I::spread(x + r * stride + 4);
                acc[r][j] = dot_pairs(acc[r][j], a_even, even);
                acc[r][j + 1] = dot_pairs(acc[r][j + 1], b_even, even);
                acc[r][j] = dot_pairs(acc[r][j], a_odd, odd);
                acc[r][j + 1] = dot_pairs(acc[r][j + 1], b_odd, odd);
            }
        }
#endif
    }
    for (int j = 0; j < NV; j++) {
        const F by = F::load(scale + j * F::W);
        for (int r = 0; r < MR; r++) {
            I total = acc[r][j];
            if (EVERSTREAM_DOT) total = total - I::load(sums + j * F::W);
            (total.to_float() * (by * F::set(x_scale[r]))).store(tmp + r * PANEL + j * F::W);
        }
    }
    (void)sums;
}

inline void widen(const uint16_t* w, int k, float* out) {
    for (int i = 0; i < k; i += 2, w += 2 * PANEL, out += 2 * PANEL)
        for (int j = 0; j < NV; j++) {
            F::even(w + j * 2 * F::W).store(out + j * F::W);
            F::odd(w + j * 2 * F::W).store(out + PANEL + j * F::W);
        }
}

// Where the products go, row by row.
enum class Into { store, add, swiglu, gelu };
struct Output {
    float* y;
    int stride;
    Into into = Into::store;
};

inline void finish_row(const Matrix& w, int panel, float* tmp, const Output& out, int row) {
    const int begin = panel * PANEL, n = w.n - begin < PANEL ? w.n - begin : PANEL;
    if (w.bias) map(tmp, tmp, w.bias + begin, PANEL, [](F a, F b) { return a + b; });
    float* y = out.y + size_t(row) * out.stride;
    switch (out.into) {
        case Into::store: std::memcpy(y + begin, tmp, size_t(n) * 4); break;
        case Into::add: map(y + begin, y + begin, tmp, n, [](F a, F b) { return a + b; }); break;
        case Into::gelu: map(y + begin, tmp, n, [](F a) { return gelu(a); }); break;
        case Into::swiglu: {  // y has room for whole half panels
            const auto glu = [](F gate, F value) { return silu(gate) * value; };
            map(y + begin / 2, tmp, tmp + PANEL / 2, PANEL / 2, glu);
            break;
        }
    }
}

// Room of one thread: widened weights and the products of one task.
struct Tiles {
    alignas(64) float weights[BLOCK_K * PANEL];
    alignas(64) float products[TASK_ROWS * PANEL];
};

template <int MR>
inline void tile(const Matrix& w, const Input& x, int row, int panel, float* tmp) {
    const char* data = (const char*)w.data + size_t(panel) * w.panel_bytes();
    const float* f = x.f + size_t(row) * x.stride;
    switch (w.precision) {
        case Precision::float32:
            tile_float<MR>(f, x.stride, (const float*)data, w.k, tmp, true);
            break;
        case Precision::bfloat16:
#if EVERSTREAM_DOT
            tile_dot<MR>(x.half + size_t(row) * x.stride, x.stride, (const uint16_t*)data, w.k, tmp);
#else
            tile_bf16<MR>(f, x.stride, (const uint16_t*)data, w.k_padded, tmp);
#endif
            break;
        case Precision::int8: {
            const size_t stride = size_t(x.stride / 4) * QUAD_BYTES;
            tile_int8<MR>(
                x.quads + size_t(row) * stride, stride, x.scale + row, (const int8_t*)data,
                w.k_padded, w.scale + panel * PANEL, w.sums + panel * PANEL, tmp);
            break;
        }
    }
}

template <class Fn>
inline void with_rows(int rows, Fn fn) {
    static_assert(ROWS == 6, "one case per height of a tile");
    switch (rows) {
        case 1: fn(std::integral_constant<int, 1>()); break;
        case 2: fn(std::integral_constant<int, 2>()); break;
        case 3: fn(std::integral_constant<int, 3>()); break;
        case 4: fn(std::integral_constant<int, 4>()); break;
        case 5: fn(std::integral_constant<int, 5>()); break;
        default: fn(std::integral_constant<int, 6>());
    }
}

// Brings part `i` of `parts` of a panel into the second cache.
inline void prefetch_part(const char* panel, size_t bytes, int i, int parts) {
    const size_t begin = bytes * size_t(i) / size_t(parts), end = bytes * size_t(i + 1) / size_t(parts);
    for (size_t at = begin; at < end; at += 64) __builtin_prefetch(panel + at, 0, 2);
}

// One panel of outputs for `rows` (at most TASK_ROWS) rows from `row` on. Meanwhile the panel
// `ahead`, which this thread will probably need next, is fetched.
inline void matmul_task(
    const Matrix& w, const Input& x, int row, int rows, int panel, int ahead, const Output& out,
    Tiles& t) {
    const int blocks = (rows + ROWS - 1) / ROWS;
    const bool widened = w.precision == Precision::bfloat16 && !EVERSTREAM_DOT && blocks > 1;
    const char* data = (const char*)w.data;
    const int tiles = blocks * (widened ? (w.k_padded + BLOCK_K - 1) / BLOCK_K : 1);
    int num_done = 0;
    const auto each_block = [&](auto fn) {
        for (int b = 0; b < blocks; b++) {
            const int begin = rows * b / blocks, end = rows * (b + 1) / blocks;
            if (blocks > 1 && ahead < w.num_panels())
                prefetch_part(
                    data + size_t(ahead) * w.panel_bytes(), w.panel_bytes(), num_done++, tiles);
            with_rows(end - begin, [&](auto height) { fn(height, begin); });
        }
    };
    if (widened) {
        const uint16_t* weights = (const uint16_t*)(data + size_t(panel) * w.panel_bytes());
        for (int i = 0; i < w.k_padded; i += BLOCK_K) {
            const int k = w.k_padded - i < BLOCK_K ? w.k_padded - i : BLOCK_K;
            widen(weights + size_t(i) * PANEL, k, t.weights);
            each_block([&](auto height, int begin) {
                const float* f = x.f + size_t(row + begin) * x.stride + i;
                tile_float<height()>(f, x.stride, t.weights, k, t.products + begin * PANEL, i == 0);
            });
        }
    } else {
        each_block([&](auto height, int begin) {
            tile<height()>(w, x, row + begin, panel, t.products + begin * PANEL);
        });
    }
    for (int r = 0; r < rows; r++) finish_row(w, panel, t.products + r * PANEL, out, row + r);
}

// One row of a table as float32.
inline void look_up(const Table& table, int row, float* out) {
    const size_t at = size_t(row) * table.k;
    switch (table.precision) {
        case Precision::float32: std::memcpy(out, (const float*)table.data + at, size_t(table.k) * 4); break;
        case Precision::bfloat16: {
            const uint16_t* p = (const uint16_t*)table.data + at;
            for (int i = 0; i < table.k; i++) {
                const uint32_t u = uint32_t(p[i]) << 16;
                std::memcpy(out + i, &u, 4);
            }
            break;
        }
        case Precision::int8: {
            const int8_t* p = (const int8_t*)table.data + at;
            for (int i = 0; i < table.k; i++) out[i] = float(p[i]) * table.scale[row];
            break;
        }
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
