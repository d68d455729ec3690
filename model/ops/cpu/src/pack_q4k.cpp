#include "pack_q4k.h"

#include <cstring>

namespace everstream {

namespace {

// The step of a group, and its bound.
struct Six {
    uint8_t step, bound;
};

Six six_of(const uint8_t* packed, int group) {
    const int i = group % 4;
    const uint8_t a = packed[i], b = packed[4 + i], c = packed[8 + i];
    if (group < 4) return {uint8_t(a & 63), uint8_t(b & 63)};
    return {uint8_t((c & 15) | (a >> 6 << 4)), uint8_t((c >> 4) | (b >> 6 << 4))};
}

// The word of codes 8 i to 8 i + 7 of a group: the low halves of its bytes are the first four.
uint32_t word_of(const uint8_t* codes, int group, int i) {
    const uint8_t* bytes = codes + group / 2 * GROUP + i * 8;
    const int shift = group % 2 * 4;
    uint32_t word = 0;
    for (int j = 0; j < 4; j++) {
        const uint32_t low = bytes[j] >> shift & 15, high = bytes[4 + j] >> shift & 15;
        word |= (low | high << 4) << 8 * j;
    }
    return word;
}

}  // namespace

void pack_q4k(const uint8_t* blocks, size_t num, char* part, size_t P, size_t lane) {
    constexpr size_t WORDS = GROUP / 8;
    for (size_t b = 0; b < num; b++, blocks += Q4K_BYTES) {
        const uint8_t *packed = blocks + 4, *codes = blocks + 16;
        auto* words = reinterpret_cast<uint32_t*>(part);
        auto* steps = reinterpret_cast<uint8_t*>(words + BLOCK_GROUPS * WORDS * P);
        uint8_t* bounds = steps + BLOCK_GROUPS * P;
        auto* halves = reinterpret_cast<uint16_t*>(bounds + BLOCK_GROUPS * P);
        for (int g = 0; g < BLOCK_GROUPS; g++) {
            for (size_t i = 0; i < WORDS; i++)
                words[(size_t(g) * WORDS + i) * P + lane] = word_of(codes, g, int(i));
            const Six six = six_of(packed, g);
            steps[size_t(g) * P + lane] = six.step;
            const int place = g % 4 == 1 ? 2 : g % 4 == 2 ? 1 : g % 4;  // the order 0 2 1 3
            bounds[(size_t(g / 4) * P + lane) * 4 + size_t(place)] = six.bound;
        }
        std::memcpy(halves + lane, blocks, 2);
        std::memcpy(halves + P + lane, blocks + 2, 2);
        part = reinterpret_cast<char*>(halves + 2 * P);
    }
}

}  // namespace everstream
