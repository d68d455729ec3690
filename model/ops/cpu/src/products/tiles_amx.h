// Tiles of AMX, the unit that multiplies blocks of 16 times 16: for int8 and bfloat16. Groups of 32 weights
// that share a scale gain nothing: their sums have to leave the unit before they are added up.
//
// int8: the sums are exact, so they are those of the dot products. bfloat16: the unit adds the products
// of 16 even inputs in order, those of the odd ones between them likewise, then both sums to the output,
// and takes what is below 2^-126 for zero (Intel's Software Developer's Manual, TDPBF16PS). Vectors add
// few rows in the same way.
#pragma once

#include "products/tiles_int8.h"

#if EVERSTREAM_AMX
namespace everstream {
namespace EVERSTREAM_LEVEL {

// A register has up to AMX_ROWS rows of 16 words, each of four numbers of int8 or two of bfloat16.
constexpr int AMX_WORDS = 16;

// What has been written to memory is there when the unit reads it. GCC's intrinsics do not say that they
// read memory, or only eight bytes of it.
inline void all_written(const void* at) { asm volatile("" ::"r"(at) : "memory"); }

inline F from_bf16(uint16_t bits) {
    return {_mm512_castsi512_ps(_mm512_set1_epi32(int(uint32_t(bits) << 16)))};
}

// Products of bfloat16 by vectors, with the bits of the unit where numbers below 2^-126 are zero.
template <int MR, int N, class Prefetch>
__attribute__((noinline)) void tile_as_amx(
    const uint16_t* x, int stride, const uint16_t* w, size_t parts, int k, Prefetch ahead, float* tmp) {
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int begin = 0; begin < k; begin += 2 * AMX_WORDS) {
        const int end = k - begin < 2 * AMX_WORDS ? k : begin + 2 * AMX_WORDS;
        F even[MR][N], odd[MR][N];
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < N; j++) even[r][j] = odd[r][j] = F::set(0.0f);
        for (int i = begin; i < end; i += 2, w += 2 * PART) {
            ahead.template prefetch<N>(w, parts);
            for (int j = 0; j < N; j++) {
                const F w_even = F::even(vector_at(w, parts, j)), w_odd = F::odd(vector_at(w, parts, j));
                for (int r = 0; r < MR; r++) {
                    const uint16_t* at = x + size_t(r) * stride + i;
                    even[r][j] = fma(from_bf16(at[0]), w_even, even[r][j]);
                    odd[r][j] = fma(from_bf16(at[1]), w_odd, odd[r][j]);
                }
            }
        }
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < N; j++) acc[r][j] = acc[r][j] + (even[r][j] + odd[r][j]);
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j].store(tmp + r * PANEL + j * F::W);
}

// The shapes of the eight registers.
struct alignas(64) AmxShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int first, int end, int num_rows) {
        for (int i = first; i < end; i++) bytes[i] = AMX_WORDS * 4, rows[i] = uint8_t(num_rows);
    }
};

// For tiles of so many rows: 0 to 3 add up; of one block of rows 4 has the inputs, and 5 to 7 weights; of
// two 4 and 5 have inputs, and 6 and 7 weights.
inline void set_amx_shapes(int rows) {
    AmxShapes shapes;
    shapes.set(0, 8, AMX_ROWS);
    if (rows <= AMX_ROWS) {
        shapes.set(0, 5, rows);
    } else {
        shapes.set(2, 4, rows - AMX_ROWS);
        shapes.set(5, 6, rows - AMX_ROWS);
    }
    all_written(&shapes);
    _tile_loadconfig(&shapes);
}

// Adds what BLOCKS of rows and N vectors of outputs have of AMX_WORDS: words of inputs at x, in rows
// `stride` bytes apart, and of weights at w.
template <bool INTEGERS, int BLOCKS, int N>
inline void add_amx(const uint8_t* x, size_t stride, const uint8_t* w, size_t parts) {
    constexpr size_t STEP = PART * 4;
#define EVERSTREAM_ADD_AMX(sum, x, w) \
    if constexpr (INTEGERS) _tile_dpbsud(sum, x, w); else _tile_dpbf16ps(sum, x, w)
    _tile_loadd(4, x, stride);
    if constexpr (BLOCKS == 2) {
        _tile_loadd(6, w, STEP);
        EVERSTREAM_ADD_AMX(0, 4, 6);
        _tile_loadd(7, w + F::W * 4, STEP);
        EVERSTREAM_ADD_AMX(1, 4, 7);
        _tile_loadd(5, x + AMX_ROWS * stride, stride);
        EVERSTREAM_ADD_AMX(2, 5, 6);
        EVERSTREAM_ADD_AMX(3, 5, 7);
    } else {
        _tile_loadd(5, w, STEP);
        EVERSTREAM_ADD_AMX(0, 4, 5);
        _tile_loadd(6, w + F::W * 4, STEP);
        EVERSTREAM_ADD_AMX(1, 4, 6);
        if constexpr (N == 4) {
            _tile_loadd(7, w + parts, STEP);
            EVERSTREAM_ADD_AMX(2, 4, 7);
            _tile_loadd(5, w + parts + F::W * 4, STEP);
            EVERSTREAM_ADD_AMX(3, 4, 5);
        }
    }
#undef EVERSTREAM_ADD_AMX
}

// The last words, fewer than AMX_WORDS, with zeros behind them.
template <bool INTEGERS, int BLOCKS, int N>
inline void add_amx_rest(
    const uint8_t* x, size_t stride, const uint8_t* w, size_t parts, int words, int rows) {
    alignas(64) uint8_t inputs[2 * AMX_ROWS * AMX_WORDS * 4] = {};
    alignas(64) uint8_t weights[NV / TALL_NV][AMX_WORDS * PART * 4] = {};
    for (int r = 0; r < rows; r++)
        std::memcpy(inputs + r * AMX_WORDS * 4, x + size_t(r) * stride, size_t(words) * 4);
    for (int p = 0; p < N / TALL_NV; p++)
        std::memcpy(weights[p], w + size_t(p) * parts, size_t(words) * PART * 4);
    all_written(inputs), all_written(weights);
    add_amx<INTEGERS, BLOCKS, N>(inputs, AMX_WORDS * 4, weights[0], sizeof weights[0]);
}

// `tmp` [rows][PANEL] = the sums of `words` words, as int32 if INTEGERS, else as float32; `parts` in
// bytes. The shapes are set.
template <bool INTEGERS, int BLOCKS, int N, class Prefetch>
inline void tile_amx(
    const uint8_t* x, size_t stride, const uint8_t* w, size_t parts, int words, int rows, Prefetch ahead,
    float* tmp) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BLOCKS == 2 || N == 4) _tile_zero(2);
    if constexpr (BLOCKS == 2 || N == 4) _tile_zero(3);
    int i = 0;
    for (; i + AMX_WORDS <= words; i += AMX_WORDS, x += AMX_WORDS * 4, w += AMX_WORDS * PART * 4) {
        for (int word = 0; word < AMX_WORDS; word++)
            ahead.template prefetch_bytes<N>(w + word * PART * 4, parts, PART * 4);
        add_amx<INTEGERS, BLOCKS, N>(x, stride, w, parts);
    }
    if (i < words) add_amx_rest<INTEGERS, BLOCKS, N>(x, stride, w, parts, words - i, rows);
    constexpr size_t STEP = PANEL * 4;
    _tile_stored(0, tmp, STEP);
    _tile_stored(1, tmp + F::W, STEP);
    if constexpr (BLOCKS == 2) {
        _tile_stored(2, tmp + AMX_ROWS * PANEL, STEP);
        _tile_stored(3, tmp + AMX_ROWS * PANEL + F::W, STEP);
    } else if constexpr (N == 4) {
        _tile_stored(2, tmp + 2 * F::W, STEP);
        _tile_stored(3, tmp + 3 * F::W, STEP);
    }
}

// The sums of int8, which are in `tmp` as integers, as float32, as in tile_int8.
inline void scale_sums(
    float* tmp, int rows, int vectors, const float* x_scale, const float* scale, const int32_t* x_sums,
    size_t stride) {
    for (int r = 0; r < rows; r++) {
        const int32_t first = -INT8_OFFSET * *row_at(x_sums, r, stride);
        const F by = F::set(x_scale[r]);
        for (int j = 0; j < vectors; j++) {
            float* at = tmp + r * PANEL + j * F::W;
            const I sums = I::load(at) + I{_mm512_set1_epi32(first)};
            (sums.to_float() * (F::load(scale + j * F::W) * by)).store(at);
        }
    }
}

template <bool INTEGERS, class Prefetch>
inline void tile_amx(
    const uint8_t* x, size_t stride, const uint8_t* w, size_t parts, int words, int rows, int vectors,
    Prefetch ahead, float* tmp) {
    const auto run = rows > AMX_ROWS ? tile_amx<INTEGERS, 2, TALL_NV, Prefetch>
                     : vectors == NV ? tile_amx<INTEGERS, 1, NV, Prefetch>
                                     : tile_amx<INTEGERS, 1, TALL_NV, Prefetch>;
    run(x, stride, w, parts, words, rows, ahead, tmp);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
#endif
