// Products with int4 weights: 4-bit codes less 8, times a float16 scale for each GROUP along k.
//
// The codes of a group are multiplied as they are: the sum starts at -8 times that of the inputs.
#pragma once

#include "products/tiles_int8.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// A group of a part: GROUP_WORDS times [PART] words of eight codes, then [PART] scales. The low
// halves of a word's bytes are codes 0 to 3, the high halves 4 to 7.
constexpr int GROUP_WORDS = GROUP / 8;
constexpr int SCALES_AT = GROUP_WORDS * PART * 4, GROUP_BYTES = SCALES_AT + PART * 2;

#if EVERSTREAM_DOT
// total += the products of a group.
template <int MR, int N, class Prefetch>
inline void add_group(
    const uint8_t* x, size_t stride, const uint8_t* w, size_t parts, Prefetch& ahead,
    Sums4 (&total)[MR][N]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    // Unrolled, GCC 12 keeps the totals in registers from one group to its scale.
#pragma GCC unroll 4
    for (int word = 0; word < GROUP_WORDS; word++, x += 8) {
        ahead.template prefetch_bytes<N>(w + word * PART * 4, parts, PART * 4);
        __m512i low[N], high[N];
        for (int j = 0; j < N; j++) {
            const __m512i both = I::load(vector_at(w + word * PART * 4, parts, j)).v;
            low[j] = _mm512_and_si512(both, nibble);
            high[j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
        }
        for (int r = 0; r < MR; r++) {
            const __m512i a = I::spread(x + r * stride).v, b = I::spread(x + r * stride + 4).v;
            for (int j = 0; j < N; j++)
                total[r][j] = (Sums4)_mm512_dpbusd_epi32((__m512i)total[r][j], low[j], a);
            for (int j = 0; j < N; j++)
                total[r][j] = (Sums4)_mm512_dpbusd_epi32((__m512i)total[r][j], high[j], b);
        }
    }
}
#else
template <int MR, int N, class Prefetch>
inline void add_group(
    const uint8_t* x, size_t stride, const uint8_t* w, size_t parts, Prefetch& ahead,
    Sums4 (&total)[MR][N]) {
    for (int word = 0; word < GROUP_WORDS; word++, x += 16) {
        ahead.template prefetch_bytes<N>(w + word * PART * 4, parts, PART * 4);
        for (int j = 0; j < N; j++) {
            const I codes = I::load(vector_at(w + word * PART * 4, parts, j));
            const I c02 = codes.nibbles<0>(), c46 = codes.nibbles<4>();
            const I c13 = codes.nibbles<8>(), c57 = codes.nibbles<12>();
            for (int r = 0; r < MR; r++) {
                const uint8_t* at = x + r * stride;
                I sum = total[r][j];
                sum = dot_pairs(sum, c02, I::spread(at));
                sum = dot_pairs(sum, c13, I::spread(at + 4));
                sum = dot_pairs(sum, c46, I::spread(at + 8));
                total[r][j] = dot_pairs(sum, c57, I::spread(at + 12));
            }
        }
    }
}
#endif

// See tiles.h; `parts` in bytes, `x_sums` as in `Input`. A tile has two accumulators for an output, so
// larger ones are made of some that fit the registers; unpacking twice costs less than spilling.
template <int MR, int N, class Prefetch>
inline void tile_int4(
    const uint8_t* x, size_t stride, const float* x_scale, const uint8_t* w, size_t parts,
    int groups, const int32_t* x_sums, Prefetch ahead, float* tmp) {
    if constexpr (N > TALL_NV && MR > 2) {
        tile_int4<MR, TALL_NV>(x, stride, x_scale, w, parts, groups, x_sums, ahead, tmp);
        return tile_int4<MR, TALL_NV>(
            x, stride, x_scale, w + parts, parts, groups, x_sums, ahead, tmp + PART);
    }
    if constexpr (MR > FLAT_ROWS) {
        constexpr int HALF = MR / 2;
        tile_int4<HALF, N>(x, stride, x_scale, w, parts, groups, x_sums, ahead, tmp);
        return tile_int4<MR - HALF, N>(
            x + HALF * stride, stride, x_scale + HALF, w, parts, groups,
            row_at(x_sums, HALF, stride), ahead, tmp + HALF * PANEL);
    }
    F acc[MR][N];
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++) acc[r][j] = F::set(0.0f);
    for (int g = 0; g < groups; g++, w += GROUP_BYTES, x += GROUP / 4 * QUAD_BYTES) {
        Sums4 total[MR][N];
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < N; j++)
                total[r][j] = sums_from(-8 * row_at(x_sums, r, stride)[1 + g]);
        add_group<MR, N>(x, stride, w, parts, ahead, total);
        ahead.template prefetch_bytes<N>(w + SCALES_AT, parts, GROUP_BYTES - SCALES_AT);
        for (int j = 0; j < N; j++) {
            const uint8_t* scales = w + size_t(j / TALL_NV) * parts + SCALES_AT;
            const F scale = F::half((const uint16_t*)scales + j % TALL_NV * F::W);
            for (int r = 0; r < MR; r++)
                acc[r][j] = fma(to_integers(total[r][j]).to_float(), scale, acc[r][j]);
        }
    }
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < N; j++)
            (acc[r][j] * F::set(x_scale[r])).store(tmp + r * PANEL + j * F::W);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
