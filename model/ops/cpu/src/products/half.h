// float16 (IEEE 754 binary16) as bits; F has whole vectors of it.
#pragma once

#include <cstdint>
#include <cstring>

namespace everstream {
namespace EVERSTREAM_LEVEL {

// The nearest float16, ties to even; infinity beyond the largest, and a NaN stays one.
inline uint16_t to_half(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const auto sign = uint16_t(u >> 16 & 0x8000);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return uint16_t(sign | 0x7e00);
    if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00);
    if (u >= 0x38800000u) return uint16_t(sign | ((u + 0xc8000fffu + (u >> 13 & 1)) >> 13));
    float steps;  // of 2^-24, which are the last bits of 0.5
    std::memcpy(&steps, &u, 4);
    steps += 0.5f;
    std::memcpy(&u, &steps, 4);
    return uint16_t(sign | (u - 0x3f000000u));
}

inline float from_half(uint16_t half) {
    uint32_t u = uint32_t(half & 0x7fff) << 13;
    const bool finite = u < 0x0f800000u;
    float x;
    std::memcpy(&x, &u, 4);
    x *= 0x1p112f;
    std::memcpy(&u, &x, 4);
    u |= uint32_t(half & 0x8000) << 16 | (finite ? 0 : 0x7f800000u);
    std::memcpy(&x, &u, 4);
    return x;
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
