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

#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#define _mm512_dpbusd_epi32 emulated_dpbusd
#define _mm512_dpbf16_ps emulated_dpbf16
