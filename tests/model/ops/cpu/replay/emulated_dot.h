// The dot products of AVX-512 VNNI and BF16 by other instructions, so that the level v4dot's code
// runs on any processor with AVX-512. Included before everything else.
#pragma once

#include <immintrin.h>

// Four products of unsigned and signed bytes in each lane.
static inline __m512i emulated_dpbusd(__m512i sum, __m512i a, __m512i b) {
    const __m512i a_even = _mm512_and_si512(a, _mm512_set1_epi16(0x00ff));
    const __m512i a_odd = _mm512_srli_epi16(a, 8);
    const __m512i b_even = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8);
    const __m512i b_odd = _mm512_srai_epi16(b, 8);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a_even, b_even));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a_odd, b_odd));
}

// Two products of bfloat16 numbers in each lane, each exact in float32, the odd one added first.
static inline __m512 emulated_dpbf16(__m512 sum, __m512bh a, __m512bh b) {
    const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
    const auto odd = [high](__m512bh x) {
        return _mm512_castsi512_ps(_mm512_and_si512((__m512i)x, high));
    };
    const auto even = [](__m512bh x) {
        return _mm512_castsi512_ps(_mm512_slli_epi32((__m512i)x, 16));
    };
    sum = _mm512_fmadd_ps(odd(a), odd(b), sum);
    return _mm512_fmadd_ps(even(a), even(b), sum);
}

// Both vectors rounded to the nearest bfloat16, ties to even, those of `low` first.
static inline __m512bh emulated_cvtne2ps(__m512 high, __m512 low) {
    const auto rounded = [](__m512 x) {
        const __m512i u = _mm512_castps_si512(x);
        const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        const __m512i sum = _mm512_add_epi32(u, _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7fff)));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
    };
    return (__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512(rounded(low)), rounded(high), 1);
}

#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#define _mm512_dpbusd_epi32 emulated_dpbusd
#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps
