// The rows that go into products, in the form that the weights' precision needs.
#pragma once

#include "products/gguf_blocks.h"
#include "products/numeric.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define EVERSTREAM_DOT 1
#else
#define EVERSTREAM_DOT 0
#endif

namespace everstream {
namespace EVERSTREAM_LEVEL {

constexpr int padded(int n, int to) { return (n + to - 1) / to * to; }

// Bytes per four inputs of a row of integers: bytes, or 16-bit numbers in the order 0 2 1 3.
constexpr int QUAD_BYTES = EVERSTREAM_DOT ? 4 : 8;
// Of such a row with room for its sums: of all integers, then of each GROUP of them, in 32 and in 16
// bits, and of each half of a group in 16.
constexpr size_t integer_bytes(int stride) {
    const int groups = padded(stride, 2 * GROUP) / GROUP;
    return size_t(stride / 4 * QUAD_BYTES + 4 + groups * 10);
}

// The rows of x; [rows][stride], padded with zeros.
struct Input {
    const float* f = nullptr;
    int stride = 0;
    uint16_t* half = nullptr;     // bfloat16, where EVERSTREAM_DOT
    uint8_t* integers = nullptr;  // int8, [rows][integer_bytes(stride)]
    float* scale = nullptr;       // of each row of integers

    // The rows from `row` on.
    Input from(int row) const {
        const size_t n = size_t(row), at = n * size_t(stride);
        return {f + at, stride, half + at, quads(row), scale + n};
    }
    uint8_t* quads(int row) const { return integers + size_t(row) * integer_bytes(stride); }
    int32_t* sums(int row) const {
        return (int32_t*)(quads(row) + size_t(stride / 4) * QUAD_BYTES);
    }
    // Those of the groups in 16 bits.
    int16_t* short_sums(int row) const { return (int16_t*)(sums(row) + 1 + num_groups()); }
    // Those of the halves of groups.
    int16_t* half_sums(int row) const { return short_sums(row) + num_groups(); }
    int num_groups() const { return padded(stride, 2 * GROUP) / GROUP; }
};

inline bool needs_preparation(Precision p) {
    return p == Precision::int8 || has_blocks(p) ||
           (EVERSTREAM_DOT && p == Precision::bfloat16);
}

inline uint16_t to_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 64);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Numbers times `by` as integers of -127 to 127, in the low bits of 0x4b400000.
inline F rounded(F x, F by) {
    const F low = F::set(-127.0f), high = F::set(127.0f);
    return min(max(x * by, low), high) + F::set(12582912.0f);
}

struct HalfSums {
    int32_t first, second;
};

// Rounds GROUP numbers to `q` and returns the sums of both halves.
inline HalfSums quantize_group(const float* f, F by, uint8_t* q) {
    constexpr uint32_t MAGIC = 0x4b400000u, MAGIC_SUM = GROUP / 2 * MAGIC;
#if EVERSTREAM_DOT
    const __m512i a = _mm512_castps_si512(rounded(F::load(f), by).v);
    const __m512i b = _mm512_castps_si512(rounded(F::load(f + 16), by).v);
    _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128((__m128i*)(q + 16), _mm512_cvtepi32_epi8(b));
    const uint32_t sums[2] = {
        uint32_t(_mm512_reduce_add_epi32(a)), uint32_t(_mm512_reduce_add_epi32(b))};
#else
    float t[GROUP];
    uint32_t bits[GROUP], sums[2] = {};
    for (int j = 0; j < GROUP; j += F::W) rounded(F::load(f + j), by).store(t + j);
    std::memcpy(bits, t, sizeof bits);
    for (int j = 0; j < GROUP; j += 4, q += QUAD_BYTES) {
        const uint16_t pairs[4] = {
            uint16_t(bits[j]), uint16_t(bits[j + 2]), uint16_t(bits[j + 1]), uint16_t(bits[j + 3])};
        std::memcpy(q, pairs, 8);
        sums[j / (GROUP / 2)] += bits[j] + bits[j + 1] + bits[j + 2] + bits[j + 3];
    }
#endif
    return {int32_t(sums[0] - MAGIC_SUM), int32_t(sums[1] - MAGIC_SUM)};
}

#if EVERSTREAM_DOT
// Rounds k numbers to `q`, which is filled up with zeros to whole groups, and returns their sum.
inline int32_t quantize_numbers(const float* f, int k, F by, uint8_t* q) {
    constexpr uint32_t MAGIC = 0x4b400000u;
    const int end = padded(k, GROUP);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < end; i += F::W) {
        float last[F::W] = {};
        if (i + F::W > k && i < k) std::memcpy(last, f + i, size_t(k - i) * 4);
        const __m512i a = _mm512_castps_si512(rounded(F::load(i + F::W > k ? last : f + i), by).v);
        _mm_storeu_si128((__m128i*)(q + i), _mm512_cvtepi32_epi8(a));
        sum = _mm512_add_epi32(sum, a);
    }
    return int32_t(uint32_t(_mm512_reduce_add_epi32(sum)) - uint32_t(end) * MAGIC);
}
#endif

// The largest size of k numbers, and whether all are finite.
struct RowSize {
    float size, finite;  // `finite` is 0, or NaN
};
inline RowSize size_of_row(const float* f, int k) {
    constexpr int J = 4;
    const F zero = F::set(0.0f);
    F best[J], rest[J];
    for (int j = 0; j < J; j++) best[j] = rest[j] = zero;
    const auto look = [&](const float* p, int j) {
        const F x = F::load(p);
        best[j] = max(max(x, zero - x), best[j]);
        rest[j] = fma(x, zero, rest[j]);
    };
    int i = 0;
    for (; i + J * F::W <= k; i += J * F::W)
        for (int j = 0; j < J; j++) look(f + i + j * F::W, j);
    for (; i < k; i += F::W) {
        float last[F::W] = {};
        std::memcpy(last, f + i, size_t(k - i < F::W ? k - i : F::W) * 4);
        look(last, 0);
    }
    for (int j = 1; j < J; j++) best[0] = max(best[j], best[0]), rest[0] = rest[0] + rest[j];
    float sizes[F::W], zeros[F::W];
    best[0].store(sizes);
    rest[0].store(zeros);
    RowSize found = {0.0f, 0.0f};
    for (int i = 0; i < F::W; i++) {
        found.size = sizes[i] > found.size ? sizes[i] : found.size;
        found.finite += zeros[i];
    }
    return found;
}

// With the sums of groups, unless `groups` says that no weights need them.
inline void quantize_row(const Input& x, int row, const float* f, int k, [[maybe_unused]] bool groups) {
    const RowSize found = size_of_row(f, k);
    const float size = found.size;
    // A row that is not finite must not look finite afterwards.
    x.scale[row] = size / 127.0f + found.finite;
    const F inverse = F::set(size > 0.0f ? 127.0f / size : 0.0f);
    uint8_t* q = x.quads(row);
#if EVERSTREAM_DOT
    if (!groups) {
        *x.sums(row) = quantize_numbers(f, k, inverse, q);
        return;
    }
#endif
    int32_t *sums = x.sums(row), total = 0;
    int16_t *short_sums = x.short_sums(row), *half_sums = x.half_sums(row);
    for (int i = 0; i < k; i += GROUP, q += GROUP / 4 * QUAD_BYTES) {
        float last[GROUP] = {};
        if (k - i < GROUP) std::memcpy(last, f + i, size_t(k - i) * 4);
        const HalfSums halves = quantize_group(k - i < GROUP ? last : f + i, inverse, q);
        *half_sums++ = int16_t(halves.first), *half_sums++ = int16_t(halves.second);
        total += *++sums = halves.first + halves.second;
        *short_sums++ = int16_t(*sums);
    }
    *x.sums(row) = total;
}

// Fills what `needs_preparation` asks for, for one row, whose numbers are at f.
inline void prepare_row(Precision p, const Input& x, int row, const float* f, int k) {
    if (p == Precision::bfloat16) {
        uint16_t* h = x.half + size_t(row) * x.stride;
        int i = 0;
        for (; i + F::W <= k; i += F::W) F::load(f + i).store_bf16(h + i);
        for (; i < k; i++) h[i] = to_bf16(f[i]);
        if (k % 2) h[k] = 0;
    } else {
        quantize_row(x, row, f, k, p != Precision::int8);
    }
}
inline void prepare_row(Precision p, const Input& x, int row, int k) {
    prepare_row(p, x, row, x.f + size_t(row) * x.stride, k);
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
