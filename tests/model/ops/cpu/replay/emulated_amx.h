// The unit AMX by other instructions, so that the level amx's code runs on any processor with AVX-512.
// Included before everything else.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulated_dot.h"

// The registers of a thread, and what the instructions do with them, by the pseudocode of Intel's
// Software Developer's Manual.
struct EmulatedAmx {
    struct Shapes {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes;
    alignas(64) uint8_t data[8][16][64];

    void configure(const void* at) {
        std::memcpy(&shapes, at, sizeof shapes);
        std::memset(data, 0, sizeof data);
    }
    void load(int tile, const void* base, size_t stride) {
        std::memset(data[tile], 0, sizeof data[tile]);
        for (int r = 0; r < shapes.rows[tile]; r++)
            std::memcpy(data[tile][r], (const char*)base + size_t(r) * stride, shapes.bytes[tile]);
    }
    void store(int tile, void* base, size_t stride) const {
        for (int r = 0; r < shapes.rows[tile]; r++)
            std::memcpy((char*)base + size_t(r) * stride, data[tile][r], shapes.bytes[tile]);
    }
    void zero(int tile) { std::memset(data[tile], 0, sizeof data[tile]); }

    // Numbers that are not normal count as zero.
    static float normal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
    static float widen(uint16_t bits) {
        const uint32_t u = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &u, 4);
        return normal(x);
    }
    void add_bf16(int sums, int a, int b) {
        for (int m = 0; m < shapes.rows[sums]; m++)
            for (int n = 0; n < shapes.bytes[sums] / 4; n++) {
                float parts[2] = {};
                for (int k = 0; k < shapes.bytes[a] / 4; k++)
                    for (int i = 0; i < 2; i++) {
                        uint16_t x, w;
                        std::memcpy(&x, data[a][m] + 4 * k + 2 * i, 2);
                        std::memcpy(&w, data[b][k] + 4 * n + 2 * i, 2);
                        parts[i] = normal(std::fma(widen(x), widen(w), parts[i]));
                    }
                float sum;
                std::memcpy(&sum, data[sums][m] + 4 * n, 4);
                sum = normal(normal(sum) + normal(parts[0] + parts[1]));
                std::memcpy(data[sums][m] + 4 * n, &sum, 4);
            }
    }
    // Signed inputs, weights without a sign.
    void add_int8(int sums, int a, int b) {
        for (int m = 0; m < shapes.rows[sums]; m++)
            for (int n = 0; n < shapes.bytes[sums] / 4; n++) {
                int32_t sum;
                std::memcpy(&sum, data[sums][m] + 4 * n, 4);
                for (int k = 0; k < shapes.bytes[a] / 4; k++)
                    for (int i = 0; i < 4; i++)
                        sum += int8_t(data[a][m][4 * k + i]) * int(data[b][k][4 * n + i]);
                std::memcpy(data[sums][m] + 4 * n, &sum, 4);
            }
    }
};
static thread_local EmulatedAmx emulated_amx;

#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_release
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(at) emulated_amx.configure(at)
#define _tile_loadd(tile, base, stride) emulated_amx.load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_amx.store(tile, base, stride)
#define _tile_zero(tile) emulated_amx.zero(tile)
#define _tile_release() (void)0
#define _tile_dpbf16ps(sums, a, b) emulated_amx.add_bf16(sums, a, b)
#define _tile_dpbsud(sums, a, b) emulated_amx.add_int8(sums, a, b)
