// Vectors of the level that this file is compiled for: F of floats, D of doubles, I of int32.
//
// Every operation works lane by lane, and sums across lanes are taken in one fixed order
// (`Sum` in numeric.h), so all levels with a fused multiply-add give the same bits. v2 has none
// and rounds twice.
#pragma once

#include <cstdint>
#include <cstring>

#include "products/half.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define EVERSTREAM_REGISTERS 32
#elif defined(__AVX2__)
#include <immintrin.h>
#define EVERSTREAM_REGISTERS 16
#elif defined(__SSE2__)
#include <smmintrin.h>
#define EVERSTREAM_REGISTERS 16
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define EVERSTREAM_REGISTERS 32
#else
#error "no vector instructions that this project knows"
#endif

namespace everstream {
namespace EVERSTREAM_LEVEL {

#if defined(__AVX512F__)

struct F {
    static constexpr int W = 16;
    __m512 v;
    static F load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F set(float x) { return {_mm512_set1_ps(x)}; }
    // bf16 pairs (even, odd) in 32-bit lanes.
    static F even(const uint16_t* p) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
    }
    static F odd(const uint16_t* p) {
        return {_mm512_castsi512_ps(
            _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))))};
    }
    static F bf16(const uint16_t* p) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
    }
    static F int8(const int8_t* p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
    }
    static F half(const uint16_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
    }
    // Rounded to the nearest float16, ties to even.
    void store_half(uint16_t* p) const {
        const __m256i bits = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256((__m256i*)p, bits);
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    // Rounded to the nearest bfloat16, ties to even; a NaN stays one.
    void store_bf16(uint16_t* p) const {
        const __m512i u = _mm512_castps_si512(v);
        const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        const __m512i sum = _mm512_add_epi32(u, _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7fff)));
        const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        const __m512i bits = _mm512_srli_epi32(_mm512_mask_mov_epi32(sum, nan, quiet), 16);
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bits));
    }
};
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
// a < b ? x : y
inline F select_less(F a, F b, F x, F y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// p times two to the power that the low bits of m hold.
inline F scale_by_bits(F p, F m) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(
        _mm512_castps_si512(p.v), _mm512_slli_epi32(_mm512_castps_si512(m.v), 23)))};
}

struct D {
    static constexpr int W = 8;
    __m512d v;
    static D load(const double* p) { return {_mm512_loadu_pd(p)}; }
    static D widen(const float* p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
    static D set(double x) { return {_mm512_set1_pd(x)}; }
    void store(double* p) const { _mm512_storeu_pd(p, v); }
    void narrow(float* p) const { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
};
inline D operator+(D a, D b) { return {_mm512_add_pd(a.v, b.v)}; }
inline D operator*(D a, D b) { return {_mm512_mul_pd(a.v, b.v)}; }
inline D fma(D a, D b, D c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }

struct I {
    __m512i v;
    static I zero() { return {_mm512_setzero_si512()}; }
    // Four bytes from memory to every lane.
    static I spread(const void* p) {
        float bits;
        std::memcpy(&bits, p, 4);
        return {_mm512_castps_si512(_mm512_set1_ps(bits))};
    }
    static I load(const void* p) { return {_mm512_loadu_si512(p)}; }
    // Bytes of 0 to 255, one for each lane.
    static I bytes(const uint8_t* p) {
        return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))};
    }
    // Bytes of -128 to 127, one for each lane.
    static I signed_bytes(const uint8_t* p) {
        return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))};
    }
    // 16 bytes from memory, again and again.
    static I repeat(const uint8_t* p) {
        return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))};
    }
    // For each byte of `by`, of 0 to 15, that of the bytes of a `repeat`.
    I shuffled(I by) const { return {_mm512_shuffle_epi8(v, by.v)}; }
    // The bits of MASK of each byte after a shift to the right by SHIFT, or to the left.
    template <int SHIFT, int MASK>
    I bits() const {
        const __m512i shifted = SHIFT < 0 ? _mm512_slli_epi16(v, SHIFT < 0 ? -SHIFT : 0)
                                          : _mm512_srli_epi16(v, SHIFT < 0 ? 0 : SHIFT);
        return {_mm512_and_si512(shifted, _mm512_set1_epi8(MASK))};
    }
    // The bytes 0 and 2 (1 and 3) of each lane as 16-bit numbers.
    I even_bytes() const { return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8)}; }
    I odd_bytes() const { return {_mm512_srai_epi16(v, 8)}; }
    // Of each 16 bits the number in the four from SHIFT on.
    template <int SHIFT>
    I nibbles() const {
        return {_mm512_and_si512(_mm512_srli_epi32(v, SHIFT), _mm512_set1_epi32(0x000f000f))};
    }
    void store(int32_t* p) const { _mm512_storeu_si512(p, v); }
    F to_float() const { return {_mm512_cvtepi32_ps(v)}; }
    static I set(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
    // The bits of floats, and back.
    static I bits_of(F x) { return {_mm512_castps_si512(x.v)}; }
    F as_float() const { return {_mm512_castsi512_ps(v)}; }
    // The upper 16 bits of each lane as a number of 0 to 65535, and to memory.
    I high() const { return {_mm512_srli_epi32(v, 16)}; }
    void store_high(uint16_t* p) const {
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(high().v));
    }
};
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline I operator*(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
// sum + the two products of 16-bit numbers in each lane.
inline I dot_pairs(I sum, I a, I b) {
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
}

#elif defined(__AVX2__)

struct F {
    static constexpr int W = 8;
    __m256 v;
    static F load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static F set(float x) { return {_mm256_set1_ps(x)}; }
    static __m256i bits(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static F even(const uint16_t* p) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(bits(p), 16))};
    }
    static F odd(const uint16_t* p) {
        return {_mm256_castsi256_ps(
            _mm256_and_si256(bits(p), _mm256_set1_epi32(int(0xffff0000u))))};
    }
    static F bf16(const uint16_t* p) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
    }
    static F int8(const int8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
    }
    static F half(const uint16_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))};
    }
    void store_half(uint16_t* p) const {
        const __m128i bits = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i*)p, bits);
    }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store_bf16(uint16_t* p) const {
        const __m256i u = _mm256_castps_si256(v);
        const __m256i lowest = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        const __m256i sum = _mm256_add_epi32(u, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7fff)));
        const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i bits = _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, nan), 16);
        const __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
        _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
    }
};
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F select_less(F a, F b, F x, F y) {
    return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline F scale_by_bits(F p, F m) {
    return {_mm256_castsi256_ps(_mm256_add_epi32(
        _mm256_castps_si256(p.v), _mm256_slli_epi32(_mm256_castps_si256(m.v), 23)))};
}

struct D {
    static constexpr int W = 4;
    __m256d v;
    static D load(const double* p) { return {_mm256_loadu_pd(p)}; }
    static D widen(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p))}; }
    static D set(double x) { return {_mm256_set1_pd(x)}; }
    void store(double* p) const { _mm256_storeu_pd(p, v); }
    void narrow(float* p) const { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
};
inline D operator+(D a, D b) { return {_mm256_add_pd(a.v, b.v)}; }
inline D operator*(D a, D b) { return {_mm256_mul_pd(a.v, b.v)}; }
inline D fma(D a, D b, D c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }

struct I {
    __m256i v;
    static I zero() { return {_mm256_setzero_si256()}; }
    static I spread(const void* p) {
        float bits;
        std::memcpy(&bits, p, 4);
        return {_mm256_castps_si256(_mm256_set1_ps(bits))};
    }
    static I load(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
    static I bytes(const uint8_t* p) {
        return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))};
    }
    static I signed_bytes(const uint8_t* p) {
        return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))};
    }
    static I repeat(const uint8_t* p) {
        return {_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p))};
    }
    I shuffled(I by) const { return {_mm256_shuffle_epi8(v, by.v)}; }
    template <int SHIFT, int MASK>
    I bits() const {
        const __m256i shifted = SHIFT < 0 ? _mm256_slli_epi16(v, SHIFT < 0 ? -SHIFT : 0)
                                          : _mm256_srli_epi16(v, SHIFT < 0 ? 0 : SHIFT);
        return {_mm256_and_si256(shifted, _mm256_set1_epi8(MASK))};
    }
    I even_bytes() const { return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8)}; }
    I odd_bytes() const { return {_mm256_srai_epi16(v, 8)}; }
    template <int SHIFT>
    I nibbles() const {
        return {_mm256_and_si256(_mm256_srli_epi32(v, SHIFT), _mm256_set1_epi32(0x000f000f))};
    }
    void store(int32_t* p) const { _mm256_storeu_si256((__m256i*)p, v); }
    F to_float() const { return {_mm256_cvtepi32_ps(v)}; }
    static I set(uint32_t x) { return {_mm256_set1_epi32(int(x))}; }
    static I bits_of(F x) { return {_mm256_castps_si256(x.v)}; }
    F as_float() const { return {_mm256_castsi256_ps(v)}; }
    I high() const { return {_mm256_srli_epi32(v, 16)}; }
    void store_high(uint16_t* p) const {
        const __m256i bits = high().v;
        const __m128i low = _mm256_castsi256_si128(bits), upper = _mm256_extracti128_si256(bits, 1);
        _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, upper));
    }
};
inline I operator+(I a, I b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline I operator|(I a, I b) { return {_mm256_or_si256(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline I operator*(I a, I b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline I dot_pairs(I sum, I a, I b) {
    return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v))};
}

#elif defined(__SSE2__)

struct F {
    static constexpr int W = 4;
    __m128 v;
    static F load(const float* p) { return {_mm_loadu_ps(p)}; }
    static F set(float x) { return {_mm_set1_ps(x)}; }
    static __m128i bits(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
    static F even(const uint16_t* p) { return {_mm_castsi128_ps(_mm_slli_epi32(bits(p), 16))}; }
    static F odd(const uint16_t* p) {
        return {_mm_castsi128_ps(_mm_and_si128(bits(p), _mm_set1_epi32(int(0xffff0000u))))};
    }
    static F bf16(const uint16_t* p) {
        return {_mm_castsi128_ps(
            _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p)), 16))};
    }
    static F int8(const int8_t* p) {
        int32_t four;
        std::memcpy(&four, p, 4);
        return {_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)))};
    }
    static F half(const uint16_t* p) {
        const float four[4] = {from_half(p[0]), from_half(p[1]), from_half(p[2]), from_half(p[3])};
        return load(four);
    }
    void store_half(uint16_t* p) const {
        float four[4];
        store(four);
        for (int i = 0; i < 4; i++) p[i] = to_half(four[i]);
    }
    void store(float* p) const { _mm_storeu_ps(p, v); }
    void store_bf16(uint16_t* p) const {
        const __m128i u = _mm_castps_si128(v);
        const __m128i lowest = _mm_and_si128(_mm_srli_epi32(u, 16), _mm_set1_epi32(1));
        const __m128i sum = _mm_add_epi32(u, _mm_add_epi32(lowest, _mm_set1_epi32(0x7fff)));
        const __m128i quiet = _mm_or_si128(u, _mm_set1_epi32(0x400000));
        const __m128i nan = _mm_castps_si128(_mm_cmpunord_ps(v, v));
        const __m128i bits = _mm_srli_epi32(_mm_blendv_epi8(sum, quiet, nan), 16);
        _mm_storel_epi64((__m128i*)p, _mm_packus_epi32(bits, bits));
    }
};
inline F operator+(F a, F b) { return {_mm_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm_add_ps(_mm_mul_ps(a.v, b.v), c.v)}; }
inline F max(F a, F b) { return {_mm_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm_min_ps(a.v, b.v)}; }
inline F select_less(F a, F b, F x, F y) {
    return {_mm_blendv_ps(y.v, x.v, _mm_cmplt_ps(a.v, b.v))};
}
inline F scale_by_bits(F p, F m) {
    return {_mm_castsi128_ps(
        _mm_add_epi32(_mm_castps_si128(p.v), _mm_slli_epi32(_mm_castps_si128(m.v), 23)))};
}

struct D {
    static constexpr int W = 2;
    __m128d v;
    static D load(const double* p) { return {_mm_loadu_pd(p)}; }
    static D widen(const float* p) {
        return {_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p)))};
    }
    static D set(double x) { return {_mm_set1_pd(x)}; }
    void store(double* p) const { _mm_storeu_pd(p, v); }
    void narrow(float* p) const {
        _mm_storel_epi64((__m128i*)p, _mm_castps_si128(_mm_cvtpd_ps(v)));
    }
};
inline D operator+(D a, D b) { return {_mm_add_pd(a.v, b.v)}; }
inline D operator*(D a, D b) { return {_mm_mul_pd(a.v, b.v)}; }
inline D fma(D a, D b, D c) { return {_mm_add_pd(_mm_mul_pd(a.v, b.v), c.v)}; }

struct I {
    __m128i v;
    static I zero() { return {_mm_setzero_si128()}; }
    static I spread(const void* p) {
        float bits;
        std::memcpy(&bits, p, 4);
        return {_mm_castps_si128(_mm_set1_ps(bits))};
    }
    static I load(const void* p) { return {_mm_loadu_si128((const __m128i*)p)}; }
    static I bytes(const uint8_t* p) {
        int32_t four;
        std::memcpy(&four, p, 4);
        return {_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four))};
    }
    static I signed_bytes(const uint8_t* p) {
        int32_t four;
        std::memcpy(&four, p, 4);
        return {_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four))};
    }
    static I repeat(const uint8_t* p) { return load(p); }
    I shuffled(I by) const { return {_mm_shuffle_epi8(v, by.v)}; }
    template <int SHIFT, int MASK>
    I bits() const {
        const __m128i shifted = SHIFT < 0 ? _mm_slli_epi16(v, SHIFT < 0 ? -SHIFT : 0)
                                          : _mm_srli_epi16(v, SHIFT < 0 ? 0 : SHIFT);
        return {_mm_and_si128(shifted, _mm_set1_epi8(MASK))};
    }
    I even_bytes() const { return {_mm_srai_epi16(_mm_slli_epi16(v, 8), 8)}; }
    I odd_bytes() const { return {_mm_srai_epi16(v, 8)}; }
    template <int SHIFT>
    I nibbles() const {
        return {_mm_and_si128(_mm_srli_epi32(v, SHIFT), _mm_set1_epi32(0x000f000f))};
    }
    void store(int32_t* p) const { _mm_storeu_si128((__m128i*)p, v); }
    F to_float() const { return {_mm_cvtepi32_ps(v)}; }
    static I set(uint32_t x) { return {_mm_set1_epi32(int(x))}; }
    static I bits_of(F x) { return {_mm_castps_si128(x.v)}; }
    F as_float() const { return {_mm_castsi128_ps(v)}; }
    I high() const { return {_mm_srli_epi32(v, 16)}; }
    void store_high(uint16_t* p) const {
        const __m128i bits = high().v;
        _mm_storel_epi64((__m128i*)p, _mm_packus_epi32(bits, bits));
    }
};
inline I operator+(I a, I b) { return {_mm_add_epi32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {_mm_sub_epi32(a.v, b.v)}; }
inline I operator|(I a, I b) { return {_mm_or_si128(a.v, b.v)}; }
inline I operator^(I a, I b) { return {_mm_xor_si128(a.v, b.v)}; }
inline I operator*(I a, I b) { return {_mm_mullo_epi32(a.v, b.v)}; }
inline I dot_pairs(I sum, I a, I b) {
    return {_mm_add_epi32(sum.v, _mm_madd_epi16(a.v, b.v))};
}

#else  // NEON

struct F {
    static constexpr int W = 4;
    float32x4_t v;
    static F load(const float* p) { return {vld1q_f32(p)}; }
    static F set(float x) { return {vdupq_n_f32(x)}; }
    static uint32x4_t bits(const uint16_t* p) { return vreinterpretq_u32_u16(vld1q_u16(p)); }
    static F even(const uint16_t* p) { return {vreinterpretq_f32_u32(vshlq_n_u32(bits(p), 16))}; }
    static F odd(const uint16_t* p) {
        return {vreinterpretq_f32_u32(vandq_u32(bits(p), vdupq_n_u32(0xffff0000u)))};
    }
    static F bf16(const uint16_t* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))}; }
    static F int8(const int8_t* p) {
        int32_t four;
        std::memcpy(&four, p, 4);
        const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(four));
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))};
    }
    static F half(const uint16_t* p) {
        return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))};
    }
    void store_half(uint16_t* p) const { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
    void store(float* p) const { vst1q_f32(p, v); }
    void store_bf16(uint16_t* p) const {
        const uint32x4_t u = vreinterpretq_u32_f32(v);
        const uint32x4_t lowest = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
        const uint32x4_t sum = vaddq_u32(u, vaddq_u32(lowest, vdupq_n_u32(0x7fff)));
        const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
        const uint32x4_t bits = vbslq_u32(vceqq_f32(v, v), sum, quiet);
        vst1_u16(p, vshrn_n_u32(bits, 16));
    }
};
inline F operator+(F a, F b) { return {vaddq_f32(a.v, b.v)}; }
inline F operator-(F a, F b) { return {vsubq_f32(a.v, b.v)}; }
inline F operator*(F a, F b) { return {vmulq_f32(a.v, b.v)}; }
inline F operator/(F a, F b) { return {vdivq_f32(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline F select_less(F a, F b, F x, F y) { return {vbslq_f32(vcltq_f32(a.v, b.v), x.v, y.v)}; }
// As on x86, where the second operand wins over a NaN.
inline F max(F a, F b) { return select_less(b, a, a, b); }
inline F min(F a, F b) { return select_less(a, b, a, b); }
inline F scale_by_bits(F p, F m) {
    return {vreinterpretq_f32_s32(vaddq_s32(
        vreinterpretq_s32_f32(p.v), vshlq_n_s32(vreinterpretq_s32_f32(m.v), 23)))};
}

struct D {
    static constexpr int W = 2;
    float64x2_t v;
    static D load(const double* p) { return {vld1q_f64(p)}; }
    static D widen(const float* p) { return {vcvt_f64_f32(vld1_f32(p))}; }
    static D set(double x) { return {vdupq_n_f64(x)}; }
    void store(double* p) const { vst1q_f64(p, v); }
    void narrow(float* p) const { vst1_f32(p, vcvt_f32_f64(v)); }
};
inline D operator+(D a, D b) { return {vaddq_f64(a.v, b.v)}; }
inline D operator*(D a, D b) { return {vmulq_f64(a.v, b.v)}; }
inline D fma(D a, D b, D c) { return {vfmaq_f64(c.v, a.v, b.v)}; }

struct I {
    int32x4_t v;
    static I zero() { return {vdupq_n_s32(0)}; }
    static I spread(const void* p) {
        int32_t bits;
        std::memcpy(&bits, p, 4);
        return {vdupq_n_s32(bits)};
    }
    static I load(const void* p) { return {vld1q_s32((const int32_t*)p)}; }
    static I bytes(const uint8_t* p) {
        uint32_t four;
        std::memcpy(&four, p, 4);
        const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
        return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))};
    }
    static I signed_bytes(const uint8_t* p) {
        uint32_t four;
        std::memcpy(&four, p, 4);
        return {vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)))))};
    }
    static I repeat(const uint8_t* p) { return {vreinterpretq_s32_u8(vld1q_u8(p))}; }
    I shuffled(I by) const {
        const uint8x16_t bytes = vqtbl1q_u8(vreinterpretq_u8_s32(v), vreinterpretq_u8_s32(by.v));
        return {vreinterpretq_s32_u8(bytes)};
    }
    template <int SHIFT, int MASK>
    I bits() const {
        const uint8x16_t shifted = vshlq_u8(vreinterpretq_u8_s32(v), vdupq_n_s8(-SHIFT));
        return {vreinterpretq_s32_u8(vandq_u8(shifted, vdupq_n_u8(MASK)))};
    }
    I even_bytes() const {
        const int16x8_t w = vreinterpretq_s16_s32(v);
        return {vreinterpretq_s32_s16(vshrq_n_s16(vshlq_n_s16(w, 8), 8))};
    }
    I odd_bytes() const {
        return {vreinterpretq_s32_s16(vshrq_n_s16(vreinterpretq_s16_s32(v), 8))};
    }
    template <int SHIFT>
    I nibbles() const {
        const int32x4_t shifted = SHIFT ? vshrq_n_s32(v, SHIFT ? SHIFT : 1) : v;
        return {vandq_s32(shifted, vdupq_n_s32(0x000f000f))};
    }
    void store(int32_t* p) const { vst1q_s32(p, v); }
    F to_float() const { return {vcvtq_f32_s32(v)}; }
    static I set(uint32_t x) { return {vdupq_n_s32(int32_t(x))}; }
    static I bits_of(F x) { return {vreinterpretq_s32_f32(x.v)}; }
    F as_float() const { return {vreinterpretq_f32_s32(v)}; }
    I high() const {
        return {vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), 16))};
    }
    void store_high(uint16_t* p) const { vst1_u16(p, vshrn_n_u32(vreinterpretq_u32_s32(v), 16)); }
};
inline I operator+(I a, I b) { return {vaddq_s32(a.v, b.v)}; }
inline I operator-(I a, I b) { return {vsubq_s32(a.v, b.v)}; }
inline I operator|(I a, I b) { return {vorrq_s32(a.v, b.v)}; }
inline I operator^(I a, I b) { return {veorq_s32(a.v, b.v)}; }
inline I operator*(I a, I b) { return {vmulq_s32(a.v, b.v)}; }
inline I dot_pairs(I sum, I a, I b) {
    const int16x8_t x = vreinterpretq_s16_s32(a.v), y = vreinterpretq_s16_s32(b.v);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    const int32x4_t high = vmull_high_s16(x, y);
    return {vaddq_s32(sum.v, vpaddq_s32(low, high))};
}

#endif

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
