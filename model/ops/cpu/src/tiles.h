// Products of a few rows with some outputs' packed weights, for every precision but int4.
#pragma once

#include "inputs.h"

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
// Vector j of a tile's weights, of four bytes a lane; parts are `stride` weights apart.
template <class T>
inline const T* vector_at(const T* w, size_t stride, int j) {
    return w + size_t(j / TALL_NV) * stride + size_t(j % TALL_NV) * F::W * (4 / sizeof(T));
}

// Pieces of memory of `bytes` each that a thread will need after its tile, asked for some lines at a
// time.
struct Pieces {
    static constexpr int MAX = 16;
    const char* at[MAX];
    int num = 0, bytes = 0, lines = 0;
    int piece = 0, offset = 0;

    void prefetch() {
        for (int i = 0; i < lines && piece < num; i++) {
            __builtin_prefetch(at[piece] + offset, 0, 2);
            offset += 64;
            if (offset >= bytes) piece++, offset = 0;
        }
    }
};

// What else is asked for along with weights: nothing, or pieces.
struct NoPieces {
    void prefetch_pieces() const {}
};
struct WithPieces {
    Pieces* pieces;
    void prefetch_pieces() const { pieces->prefetch(); }
};

// What a thread will read later, `distance` bytes after what it reads now. The tiles over the same
// weights share the asking: each has its turn `every` so many steps, so that memory keeps up.
template <class Along>
struct Ahead : Along {
    ptrdiff_t distance;
    int every, turn;

    // Asks for what follows `num_bytes` at w of the parts that N vectors are in.
    template <int N>
    void prefetch_bytes(const uint8_t* w, size_t parts, int num_bytes) {
        if (turn-- > 0) return;
        turn = every - 1;
        this->prefetch_pieces();
        for (int j = 0; j < N; j += TALL_NV)
            for (int line = 0; line < num_bytes; line += 64)
                __builtin_prefetch((const char*)w + size_t(j / TALL_NV) * parts + distance + line, 0, 2);
    }

    // Asks for what follows N vectors at w.
    template <int N, class T>
    void prefetch(const T* w, size_t stride) {
        if (turn-- > 0) return;
        turn = every - 1;
        this->prefetch_pieces();
        for (int j = 0; j < N; j += TALL_NV)
            for (int line = 0; line < PART * 4; line += 64)
                __builtin_prefetch((const char*)vector_at(w, stride, j) + distance + line, 0, 2);
    }
};

// Where row r of a tile has its sums; rows are `stride` bytes apart.
inline const int32_t* row_sums(const int32_t* sums, int r, size_t stride) {
    return (const int32_t*)((const char*)sums + size_t(r) * stride);
}

// A tile: `tmp` [MR][PANEL] = x w for MR rows and N vectors of outputs, whose weights begin at w.

template <int MR, int N, class Look>
inline void tile_float(
    const float* x, int stride, const float* w, size_t parts, int k, Look ahead,
    float* tmp) {
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int i = 0; i < k; i++, w += PART) {
        ahead.template prefetch<N>(w, parts);
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

template <int MR, int N, class Look>
inline void tile_bf16(
    const float* x, int stride, const uint16_t* w, size_t parts, int k, Look ahead,
    float* tmp) {
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int i = 0; i < k; i += 2, w += 2 * PART) {
        ahead.template prefetch<N>(w, parts);
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
template <int MR, int N, class Look>
inline void tile_dot(
    const uint16_t* x, int stride, const uint16_t* w, size_t parts, int k, Look ahead,
    float* tmp) {
    __m512 acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = _mm512_setzero_ps();
    for (int i = 0; i < k; i += 2, w += 2 * PART) {
        ahead.template prefetch<N>(w, parts);
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

template <int MR, int N, class Look>
inline void tile_int8(
    const uint8_t* x, size_t stride, const float* x_scale, const uint8_t* w, size_t parts,
    int k, const float* scale, const int32_t* x_sums, Look ahead, float* tmp) {
    Int32s acc[MR][N];
    for (int r = 0; r < MR; r++) {  // weights are 128 more than they should be
        const int32_t sum = *row_sums(x_sums, r, stride);
        for (int j = 0; j < N; j++) acc[r][j] = Int32s{} - 128 * sum;
    }
    for (int i = 0; i < k; i += 4, w += 4 * PART, x += QUAD_BYTES) {
        ahead.template prefetch<N>(w, parts);
        __m512i wv[N];
        for (int j = 0; j < N; j++) wv[j] = _mm512_loadu_si512(vector_at(w, parts, j));
        for (int r = 0; r < MR; r++) {
            const __m512i xv = I::spread(x + r * stride).v;
            for (int j = 0; j < N; j++)
                acc[r][j] = (Int32s)_mm512_dpbusd_epi32((__m512i)acc[r][j], wv[j], xv);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) {
            const F by = F::load(scale + j * F::W) * F::set(x_scale[r]);
            (I{(__m512i)acc[r][j]}.to_float() * by).store(tmp + r * PANEL + j * F::W);
        }
}
#else
template <int MR, int N, class Look>
inline void tile_int8(
    const uint8_t* x, size_t stride, const float* x_scale, const uint8_t* w, size_t parts,
    int k, const float* scale, const int32_t*, Look ahead, float* tmp) {
    I acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = I::zero();
    for (int i = 0; i < k; i += 4, w += 4 * PART, x += QUAD_BYTES) {
        ahead.template prefetch<N>(w, parts);
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

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
