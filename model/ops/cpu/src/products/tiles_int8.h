// Sums of products of integers, and those of codes of eight bits.
#pragma once

#include "products/tiles.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

#if EVERSTREAM_DOT
// As int32 lanes: sums of type __m512i, of 64-bit lanes, GCC 12 stores to memory at every step.
using Sums4 = int32_t __attribute__((vector_size(64)));
inline Sums4 sums_from(int32_t first) { return Sums4{} + first; }
inline I to_integers(Sums4 sums) { return {(__m512i)sums}; }
// What codes of eight bits are more than they should be, since dot products take those without a sign.
constexpr int INT8_OFFSET = 128;

// total += the products of four weights along k of each output, at w, and four inputs of each row.
template <int MR, int N>
inline void add_quad(
    const uint8_t* x, size_t stride, const uint8_t* w, size_t parts, Sums4 (&total)[MR][N]) {
    __m512i wv[N];
    for (int j = 0; j < N; j++) wv[j] = _mm512_loadu_si512(vector_at(w, parts, j));
    for (int r = 0; r < MR; r++) {
        const __m512i xv = I::spread(x + r * stride).v;
        for (int j = 0; j < N; j++)
            total[r][j] = (Sums4)_mm512_dpbusd_epi32((__m512i)total[r][j], wv[j], xv);
    }
}
#else
using Sums4 = I;
inline Sums4 sums_from(int32_t first) { return I::spread(&first); }
inline I to_integers(Sums4 sums) { return sums; }
constexpr int INT8_OFFSET = 0;

template <int MR, int N>
inline void add_quad(
    const uint8_t* x, size_t stride, const uint8_t* w, size_t parts, Sums4 (&total)[MR][N]) {
    for (int j = 0; j < N; j += 2) {  // two vectors at a time, for want of registers
        const I a = I::load(vector_at(w, parts, j));
        const I b = I::load(vector_at(w, parts, j + 1));
        const I a_even = a.even_bytes(), a_odd = a.odd_bytes();
        const I b_even = b.even_bytes(), b_odd = b.odd_bytes();
        for (int r = 0; r < MR; r++) {
            const I even = I::spread(x + r * stride), odd = I::spread(x + r * stride + 4);
            total[r][j] = dot_pairs(total[r][j], a_even, even);
            total[r][j + 1] = dot_pairs(total[r][j + 1], b_even, even);
            total[r][j] = dot_pairs(total[r][j], a_odd, odd);
            total[r][j + 1] = dot_pairs(total[r][j + 1], b_odd, odd);
        }
    }
}
#endif

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
