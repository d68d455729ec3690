// The layouts in files are those of llama.cpp (ggml-common.h, ggml-quants.c).
#include "products/gguf_blocks.h"

#include <cstring>

namespace everstream {

namespace {

// A block of any type, read; halves[1] is what bounds are added times.
struct Read {
    uint8_t codes[BLOCK];
    int8_t steps[2 * BLOCK_GROUPS];
    uint8_t bounds[BLOCK_GROUPS];
    uint16_t halves[2];
};

// Of each `num` bytes the low halves, then the high ones.
void read_nibbles(const uint8_t* bytes, int num, int total, uint8_t* codes) {
    for (int i = 0; i < total; i += num, bytes += num, codes += 2 * num)
        for (int j = 0; j < num; j++) codes[j] = bytes[j] & 15, codes[num + j] = bytes[j] >> 4;
}

// float16 d and m, 16 bytes of codes: d code + m.
void read_q41(const uint8_t* block, Read& out) {
    std::memcpy(out.halves, block, 4);
    read_nibbles(block + 4, GROUP / 2, GROUP / 2, out.codes);
}

// float16 d, 32 codes with a sign: d code.
void read_q80(const uint8_t* block, Read& out) {
    std::memcpy(out.halves, block, 2);
    std::memcpy(out.codes, block + 2, GROUP);
}

// float16 d and m, of which multiples of m are subtracted.
void read_difference(const uint8_t* halves, Read& out) {
    std::memcpy(out.halves, halves, 4);
    out.halves[1] ^= 0x8000;
}

// Steps and bounds of six bits in 12 bytes.
void read_sixes(const uint8_t* packed, Read& out) {
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        const uint8_t a = packed[g % 4], b = packed[4 + g % 4], c = packed[8 + g % 4];
        out.steps[g] = int8_t(g < 4 ? a & 63 : (c & 15) | (a >> 6 << 4));
        out.bounds[g] = uint8_t(g < 4 ? b & 63 : (c >> 4) | (b >> 6 << 4));
    }
}

// float16 d and m, 12 bytes of steps and bounds, 128 bytes of codes: d step code - m bound.
void read_q4k(const uint8_t* block, Read& out) {
    read_difference(block, out);
    read_sixes(block + 4, out);
    read_nibbles(block + 16, GROUP, BLOCK / 2, out.codes);
}

// As q4_k, with 32 bytes before the codes: bit g is the fifth of group g.
void read_q5k(const uint8_t* block, Read& out) {
    read_difference(block, out);
    read_sixes(block + 4, out);
    read_nibbles(block + 16 + GROUP, GROUP, BLOCK / 2, out.codes);
    for (int i = 0; i < BLOCK; i++)
        out.codes[i] |= uint8_t((block[16 + i % GROUP] >> i / GROUP & 1) << 4);
}

// 128 bytes of low and 64 of high bits, 16 steps, float16 d: d step (code - 32).
void read_q6k(const uint8_t* block, Read& out) {
    read_nibbles(block, 2 * GROUP, BLOCK / 2, out.codes);
    for (int i = 0; i < BLOCK; i++) {
        const uint8_t high = block[128 + i / 128 * GROUP + i % GROUP];
        out.codes[i] |= uint8_t((high >> i % 128 / GROUP * 2 & 3) << 4);
    }
    std::memcpy(out.steps, block + 192, 16);
    std::memcpy(out.halves, block + 208, 2);
}

// float16 d, the high two bits of 8 steps, 4 bytes of their low ones, 128 bytes of codes into the
// table of tiles_gguf.h: d (step - 32) table[code].
void read_iq4xs(const uint8_t* block, Read& out) {
    std::memcpy(out.halves, block, 2);
    for (int g = 0; g < BLOCK_GROUPS; g++) {
        const int low = block[4 + g / 2] >> g % 2 * 4 & 15, high = block[2 + g / 4] >> g % 4 * 2 & 3;
        out.steps[g] = int8_t((low | high << 4) - 32);
    }
    read_nibbles(block + 8, GROUP / 2, BLOCK / 2, out.codes);
}

// float16 d, 16 bytes of codes into the same table: d table[code].
void read_iq4nl(const uint8_t* block, Read& out) {
    std::memcpy(out.halves, block, 2);
    read_nibbles(block + 2, GROUP / 2, GROUP / 2, out.codes);
}

void read(Precision precision, const uint8_t* block, Read& out) {
    switch (precision) {
        case Precision::q4_1: return read_q41(block, out);
        case Precision::q8_0: return read_q80(block, out);
        case Precision::q4_k: return read_q4k(block, out);
        case Precision::q5_k: return read_q5k(block, out);
        case Precision::q6_k: return read_q6k(block, out);
        case Precision::iq4_xs: return read_iq4xs(block, out);
        default: return read_iq4nl(block, out);
    }
}

// Word `i` of a group's codes: see Matrix.
uint32_t low_word(const uint8_t* codes, int i) {
    uint32_t word = 0;
    for (int j = 0; j < 4; j++)
        word |= uint32_t((codes[8 * i + j] & 15) | (codes[8 * i + 4 + j] & 15) << 4) << 8 * j;
    return word;
}

// Word `i` of `bits` bits of each code beyond four.
uint32_t high_word(const uint8_t* codes, int i, int bits) {
    const int quads = 8 / bits;  // in a word
    uint32_t word = 0;
    for (int d = 0; d < quads; d++)
        for (int j = 0; j < 4; j++)
            word |= uint32_t(codes[4 * (i * quads + d) + j] >> 4) << (8 * j + d * bits);
    return word;
}

// Four codes of eight bits.
uint32_t whole_word(const uint8_t* codes, int more) {
    uint32_t word = 0;
    for (int j = 0; j < 4; j++) word |= uint32_t(uint8_t(codes[j] + more)) << 8 * j;
    return word;
}

}  // namespace

void pack_gguf(
    Precision precision, const uint8_t* blocks, size_t num, int more, char* part, size_t P,
    size_t lane) {
    const GgufBlock format = gguf_block(precision);
    Read block = {};
    for (size_t b = 0; b < num; b++, blocks += format.file_bytes) {
        read(precision, blocks, block);
        auto* words = reinterpret_cast<uint32_t*>(part) + lane;
        for (int g = 0; g < format.groups(); g++) {
            const uint8_t* codes = block.codes + g * GROUP;
            if (format.bits == 8) {
                for (int i = 0; i < GROUP; i += 4, words += P) *words = whole_word(codes + i, more);
                continue;
            }
            for (int i = 0; i < GROUP / 8; i++, words += P) *words = low_word(codes, i);
            for (int i = 0; i < format.bits - 4; i++, words += P)
                *words = high_word(codes, i, format.bits - 4);
        }
        auto* bytes = reinterpret_cast<uint8_t*>(words - lane);
        for (int i = 0; i < format.steps; i++, bytes += P) bytes[lane] = uint8_t(block.steps[i]);
        for (int g = 0; g < format.bounds; g++) {
            const int place = g % 4 == 1 ? 2 : g % 4 == 2 ? 1 : g % 4;  // the order 0 2 1 3
            bytes[(size_t(g / 4) * P + lane) * 4 + size_t(place)] = block.bounds[g];
        }
        auto* halves = reinterpret_cast<uint16_t*>(bytes + size_t(format.bounds) * P);
        for (int i = 0; i < format.halves; i++, halves += P) halves[lane] = block.halves[i];
        part = reinterpret_cast<char*>(halves);
    }
}

}  // namespace everstream
