// y = x W^T for packed W. Each output is summed over k in order from 0, in one accumulator, so
// its bits depend neither on how many rows share a call nor on how the work is divided.
//
// bfloat16: the weights are widened and x stays float32, except at the level with bfloat16 dot
// products, which rounds x to bfloat16. int8: x is rounded to int8 with one scale per row; the
// integer sums are exact.
#pragma once

#include <array>
#include <cmath>
#include <utility>

#include "model.h"
#include "numeric.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define EVERSTREAM_DOT 1
#else
#define EVERSTREAM_DOT 0
#endif

namespace everstream {
namespace EVERSTREAM_LEVEL {

// A panel is NV vectors of outputs. A tile of accumulators leaves registers for its weights and an
// input. Where rows are many a tile takes half a panel and twice the rows, so that each weight
// that was read and widened serves more of them; such a part lies in one piece.
constexpr bool MANY_REGISTERS = EVERSTREAM_REGISTERS == 32;
constexpr int NV = MANY_REGISTERS ? 4 : 2;
constexpr int FLAT_ROWS = 6;
constexpr int TALL_ROWS = MANY_REGISTERS ? 12 : 6, TALL_NV = 2;
constexpr int PANEL = NV * F::W, PART = TALL_NV * F::W;
// How far ahead of its work a row alone asks for weights, in bytes.
constexpr ptrdiff_t NEAR = 1024;
// Rows of one task.
constexpr int TASK_ROWS = 96;

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

    // The rows from `row` on.
    Input from(int row) const {
        const size_t n = size_t(row), at = n * size_t(stride);
        return {f + at, stride, half + at, quads + at / 4 * QUAD_BYTES, scale + n};
    }
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

inline void quantize_row(const Input& x, int row, const float* f, int k) {
    const float size = largest_size(f, k);
    // A row that is not finite must not look finite afterwards.
    const float finite = sum_of(f, k, [](F a, F s) { return fma(a, F::set(0.0f), s); });
    x.scale[row] = size / 127.0f + finite;
    const F inverse = F::set(size > 0.0f ? 127.0f / size : 0.0f);
    const F low = F::set(-127.0f), high = F::set(127.0f), magic = F::set(12582912.0f);
    uint8_t* q = x.quads + size_t(row) * (x.stride / 4) * QUAD_BYTES;
    int i = 0;
#if EVERSTREAM_DOT
    for (; i + 16 <= k; i += 16, q += 16) {
        const F scaled = min(max(F::load(f + i) * inverse, low), high) + magic;
        const __m512i bits = _mm512_castps_si512(scaled.v);
        const __m512i shifted = _mm512_add_epi32(bits, _mm512_set1_epi32(128));
        _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(shifted));
    }
#endif
    for (; i < padded(k, 4); i += 16) {
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

// Fills what `needs_preparation` asks for, for one row, whose numbers are at f.
inline void prepare_row(Precision p, const Input& x, int row, const float* f, int k) {
    if (p == Precision::int8) {
        quantize_row(x, row, f, k);
    } else {
        uint16_t* h = x.half + size_t(row) * x.stride;
        for (int i = 0; i < k; i++) h[i] = to_bf16(f[i]);
        if (k % 2) h[k] = 0;
    }
}
inline void prepare_row(Precision p, const Input& x, int row, int k) {
    prepare_row(p, x, row, x.f + size_t(row) * x.stride, k);
}

// Vector j of a tile's weights, of four bytes a lane; parts are `stride` weights apart.
template <class T>
inline const T* vector_at(const T* w, size_t stride, int j) {
    return w + size_t(j / TALL_NV) * stride + size_t(j % TALL_NV) * F::W * (4 / sizeof(T));
}

// What a thread will read later, `distance` bytes after what it reads now. The tiles over the same
// weights share the asking: each has its turn `every` so many steps, so that memory keeps up.
struct Ahead {
    ptrdiff_t distance;
    int every, turn;

    // Asks for what follows N vectors at w.
    template <int N, class T>
    void prefetch(const T* w, size_t stride) {
        if (turn-- > 0) return;
        turn = every - 1;
        for (int j = 0; j < N; j += TALL_NV)
            for (int line = 0; line < PART * 4; line += 64)
                __builtin_prefetch((const char*)vector_at(w, stride, j) + distance + line, 0, 2);
    }
};

// A tile: `tmp` [MR][PANEL] = x w for MR rows and N vectors of outputs, whose weights begin at w.

template <int MR, int N>
inline void tile_float(
    const float* x, int stride, const float* w, size_t parts, int k, Ahead ahead,
    float* tmp) {
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int i = 0; i < k; i++, w += PART) {
        ahead.prefetch<N>(w, parts);
        F wv[N];
        for (int j = 0; j < N; j++) wv[j] = F::load(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i]);
            for (int j = 0; j < N; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j].store(tmp + r * PANEL + j * F::W);
}

template <int MR, int N>
inline void tile_bf16(
    const float* x, int stride, const uint16_t* w, size_t parts, int k, Ahead ahead,
    float* tmp) {
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int i = 0; i < k; i += 2, w += 2 * PART) {
        ahead.prefetch<N>(w, parts);
        F wv[N];
        for (int j = 0; j < N; j++) wv[j] = F::even(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i]);
            for (int j = 0; j < N; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
        for (int j = 0; j < N; j++) wv[j] = F::odd(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const F xv = F::set(x[size_t(r) * stride + i + 1]);
            for (int j = 0; j < N; j++) acc[r][j] = fma(xv, wv[j], acc[r][j]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j].store(tmp + r * PANEL + j * F::W);
}

#if EVERSTREAM_DOT
template <int MR, int N>
inline void tile_dot(
    const uint16_t* x, int stride, const uint16_t* w, size_t parts, int k, Ahead ahead,
    float* tmp) {
    __m512 acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = _mm512_setzero_ps();
    for (int i = 0; i < k; i += 2, w += 2 * PART) {
        ahead.prefetch<N>(w, parts);
        __m512bh wv[N];
        for (int j = 0; j < N; j++) wv[j] = (__m512bh)_mm512_loadu_si512(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const __m512bh xv = (__m512bh)I::spread(x + size_t(r) * stride + i).v;
            for (int j = 0; j < N; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], wv[j], xv);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) _mm512_storeu_ps(tmp + r * PANEL + j * F::W, acc[r][j]);
}
#endif

#if EVERSTREAM_DOT
// As int32 lanes: sums of type __m512i, of 64-bit lanes, GCC 12 stores to memory at every step.
using Int32s = int32_t __attribute__((vector_size(64)));

template <int MR, int N>
inline void tile_int8(
    const uint8_t* x, size_t stride, const float* x_scale, const int8_t* w, size_t parts,
    int k, const float* scale, const int32_t* sums, Ahead ahead, float* tmp) {
    Int32s acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = Int32s{};
    for (int i = 0; i < k; i += 4, w += 4 * PART, x += QUAD_BYTES) {
        ahead.prefetch<N>(w, parts);
        __m512i wv[N];
        for (int j = 0; j < N; j++) wv[j] = _mm512_loadu_si512(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const __m512i xv = I::spread(x + r * stride).v;
            for (int j = 0; j < N; j++)
                acc[r][j] = (Int32s)_mm512_dpbusd_epi32((__m512i)acc[r][j], xv, wv[j]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) {
            const I total = I{(__m512i)acc[r][j]} - I::load(sums + j * F::W);
            const F by = F::load(scale + j * F::W) * F::set(x_scale[r]);
            (total.to_float() * by).store(tmp + r * PANEL + j * F::W);
        }
}
#else
template <int MR, int N>
inline void tile_int8(
    const uint8_t* x, size_t stride, const float* x_scale, const int8_t* w, size_t parts,
    int k, const float* scale, const int32_t*, Ahead ahead, float* tmp) {
    I acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = I::zero();
    for (int i = 0; i < k; i += 4, w += 4 * PART, x += QUAD_BYTES) {
        ahead.prefetch<N>(w, parts);
        for (int j = 0; j < N; j += 2) {  // two vectors at a time, for want of registers
            const I a = I::load(vector_at(w, parts, j));
            const I b = I::load(vector_at(w, parts, j + 1));
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
    }
    for (int j = 0; j < N; j++) {
        const F by = F::load(scale + j * F::W);
        for (int r = 0; r < MR; r++)
            (acc[r][j].to_float() * (by * F::set(x_scale[r]))).store(tmp + r * PANEL + j * F::W);
    }
}
#endif

// Where the products go, row by row.
enum class Into { store, add, swiglu, gelu, tanh, sigmoid, square_relu };
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
        case Into::store: map(y + begin, tmp, n, [](F a) { return a; }); break;
        case Into::add: map(y + begin, y + begin, tmp, n, [](F a, F b) { return a + b; }); break;
        case Into::gelu: map(y + begin, tmp, n, [](F a) { return gelu(a); }); break;
        case Into::tanh: map(y + begin, tmp, n, [](F a) { return tanh(a); }); break;
        case Into::sigmoid: map(y + begin, tmp, n, [](F a) { return sigmoid(a); }); break;
        case Into::square_relu: {
            const F zero = F::set(0.0f);
            const auto square = [zero](F a) { return max(zero, a) * max(zero, a); };
            map(y + begin, tmp, n, square);
            break;
        }
        case Into::swiglu: {  // y has room for whole half panels
            const auto glu = [](F gate, F value) { return silu(gate) * value; };
            map(y + begin / 2, tmp, tmp + PANEL / 2, PANEL / 2, glu);
            break;
        }
    }
}

// The outputs of `panel` from vector `j` on, N of them, for MR rows from `row` on.
template <int MR, int N>
inline void tile(
    const Matrix& w, const Input& x, int row, int panel, int j, Ahead ahead, float* tmp) {
    const size_t parts = size_t(w.k_padded) * PART;  // weights from part to part
    const size_t begin = size_t(panel * NV + j) / TALL_NV * parts;
    const float* f = x.f + size_t(row) * x.stride;
    const int output = panel * PANEL + j * F::W;
    tmp += j * F::W;
    switch (w.precision) {
        case Precision::float32:
            tile_float<MR, N>(f, x.stride, (const float*)w.data + begin, parts, w.k, ahead, tmp);
            break;
        case Precision::bfloat16: {
            const uint16_t* weights = (const uint16_t*)w.data + begin;
#if EVERSTREAM_DOT
            const uint16_t* half = x.half + size_t(row) * x.stride;
            tile_dot<MR, N>(half, x.stride, weights, parts, w.k, ahead, tmp);
#else
            tile_bf16<MR, N>(f, x.stride, weights, parts, w.k_padded, ahead, tmp);
#endif
            break;
        }
        case Precision::int8: {
            const size_t stride = size_t(x.stride / 4) * QUAD_BYTES;
            tile_int8<MR, N>(
                x.quads + size_t(row) * stride, stride, x.scale + row,
                (const int8_t*)w.data + begin, parts, w.k_padded, w.scale + output,
                w.sums + output, ahead, tmp);
            break;
        }
    }
}

using Tile = void (*)(
    const Matrix&, const Input&, int row, int panel, int j, Ahead ahead, float* tmp);

template <int N, size_t... MR>
constexpr auto tiles_of_heights(std::index_sequence<MR...>) {
    return std::array<Tile, sizeof...(MR)>{tile<int(MR) + 1, N>...};
}

// One panel of outputs for `rows` (at most TASK_ROWS) rows from `row` on; `products` has room for
// them. Meanwhile the panel `ahead`, which this thread will probably need next, is asked for.
inline void matmul_task(
    const Matrix& w, const Input& x, int row, int rows, int panel, int ahead, const Output& out,
    float* products) {
    static constexpr auto flat_tiles = tiles_of_heights<NV>(std::make_index_sequence<FLAT_ROWS>());
    static constexpr auto tall_tiles =
        tiles_of_heights<TALL_NV>(std::make_index_sequence<TALL_ROWS>());
    // Of a last panel that is at most half full only that half is read.
    const int vectors = w.n - panel * PANEL > PART ? NV : TALL_NV;
    const bool tall = rows > FLAT_ROWS || vectors == TALL_NV;
    const ptrdiff_t distance = (ahead - panel) * ptrdiff_t(w.panel_bytes());
    const Tile* tiles = tall ? tall_tiles.data() : flat_tiles.data();
    const int height = tall ? TALL_ROWS : FLAT_ROWS, width = tall ? TALL_NV : NV;
    const int blocks = (rows + height - 1) / height, parts = blocks * (vectors / width);
    for (int part = 0; part < parts; part++) {
        const int b = part % blocks, j = part / blocks * width;
        const int begin = rows * b / blocks, end = rows * (b + 1) / blocks;
        // A single tile is over before the next panel is needed: it looks ahead in its own.
        const Ahead next = parts == 1 ? Ahead{NEAR, 1, 0} : Ahead{distance, blocks, b};
        tiles[end - begin - 1](w, x, row + begin, panel, j, next, products + begin * PANEL);
    }
    for (int r = 0; r < rows; r++) finish_row(w, panel, products + r * PANEL, out, row + r);
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
