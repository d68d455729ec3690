// Compiled once per level, with EVERSTREAM_LEVEL as its name. Nothing here may be shared with
// another level: no function of the standard library's templates, whose copy the linker chooses.
#include "runtime/kernels.h"

#include <chrono>

#include "products/matmul.h"
#include "products/round_int4.h"

#define EVERSTREAM_JOIN_NAME(a, b) a##b
#define EVERSTREAM_KERNELS(level) EVERSTREAM_JOIN_NAME(kernels_, level)
#define EVERSTREAM_TEXT(x) #x
#define EVERSTREAM_NAME(level) EVERSTREAM_TEXT(level)

namespace everstream {
namespace EVERSTREAM_LEVEL {
namespace {

void softmax_weights(const float* logits, int n, float inverse_temperature, float* weights) {
    const F top = F::set(largest(logits, n)), by = F::set(inverse_temperature);
    map(weights, logits, n, [&](F a) { return exp((a - top) * by); });
}

bool all_finite(const float* logits, int n) {
    const F zero = F::set(0.0f);
    F sums[4] = {zero, zero, zero, zero};
    int i = 0;
    for (; i + 4 * F::W <= n; i += 4 * F::W)
        for (int j = 0; j < 4; j++) sums[j] = fma(F::load(logits + i + j * F::W), zero, sums[j]);
    float t[F::W], total = 0.0f;
    ((sums[0] + sums[1]) + (sums[2] + sums[3])).store(t);
    for (float x : t) total += x;
    for (; i < n; i++) total += logits[i] * 0.0f;
    return total == 0.0f;
}

// The first of the largest. Blocks are compared, and only the best one is looked through.
int arg_max(const float* logits, int n) {
    int best_block = 0;
    float best = -INFINITY;
    for (int i = 0; i < n; i += SAMPLER_BLOCK) {
        const float top = largest(logits + i, n - i < SAMPLER_BLOCK ? n - i : SAMPLER_BLOCK);
        if (top > best) best = top, best_block = i;
    }
    int i = best_block;
    while (i < n && logits[i] != best) i++;
    return i;
}

void block_sums(const float* weights, int n, float* sums) {
    for (int i = 0; i < n; i += SAMPLER_BLOCK)
        sums[i / SAMPLER_BLOCK] = sum(weights + i, n - i < SAMPLER_BLOCK ? n - i : SAMPLER_BLOCK);
}

// The rate of a tile whose operands are in the nearest cache: what this code could reach at most.
double multiply_add_rate(double seconds, Precision precision) {
    constexpr int K = 64, MAX_ROWS = 32;
    struct Operands {
        alignas(64) float weights[K * PANEL], x[MAX_ROWS * K], scales[MAX_ROWS + PANEL];
        alignas(64) float products[MAX_ROWS * PANEL];
        alignas(64) uint16_t half[MAX_ROWS * K];
        alignas(64) uint8_t integers[MAX_ROWS * integer_bytes(K)];
    } at = {};
    Input in;
    in.f = at.x, in.stride = K, in.half = at.half, in.integers = at.integers, in.scale = at.scales;
    Matrix w;
    w.precision = precision, w.n = w.panel = PANEL, w.k = w.k_padded = K, w.data = at.weights;
    w.scale = at.scales + MAX_ROWS;
    const int rows = tile_rows(precision, MAX_ROWS).tall;
    const auto begin = std::chrono::steady_clock::now();
    int64_t rounds = 0;
    double elapsed = 0;
    while (elapsed < seconds) {
        Multiplier multiplier(w, in, MAX_ROWS);
        for (int i = 0; i < 256; i++)
            multiplier.multiply(0, rows, 0, 0, TALL_NV, Ahead<NoPieces>{{}, 0, 1, 0}, at.products);
        rounds += 256;
        const auto now = std::chrono::steady_clock::now();
        elapsed = std::chrono::duration<double>(now - begin).count();
    }
    return double(rounds) * 2.0 * rows * PART * K / elapsed;
}

// Bytes per second that one thread reads from `memory`, again and again.
double read_rate(const float* memory, size_t bytes, double seconds) {
    const size_t n = bytes / 4 / (8 * F::W) * (8 * F::W);
    F sums[8];
    for (F& sum : sums) sum = F::set(0.0f);
    const auto begin = std::chrono::steady_clock::now();
    double elapsed = 0, read = 0;
    while (elapsed < seconds) {
        for (size_t i = 0; i < n; i += 8 * F::W)
            for (int j = 0; j < 8; j++) sums[j] = sums[j] + F::load(memory + i + j * F::W);
        read += double(n * 4);
        const auto now = std::chrono::steady_clock::now();
        elapsed = std::chrono::duration<double>(now - begin).count();
    }
    float kept[F::W];
    for (const F& sum : sums) sum.store(kept);
    volatile float sink = kept[0];
    (void)sink;
    return read / elapsed;
}

}  // namespace
}  // namespace EVERSTREAM_LEVEL

extern const Kernels EVERSTREAM_KERNELS(EVERSTREAM_LEVEL);
const Kernels EVERSTREAM_KERNELS(EVERSTREAM_LEVEL) = {
    EVERSTREAM_NAME(EVERSTREAM_LEVEL),
    Level::EVERSTREAM_LEVEL,
    EVERSTREAM_LEVEL::PANEL,
    EVERSTREAM_LEVEL::PART,
    EVERSTREAM_DOT != 0,
    EVERSTREAM_LEVEL::softmax_weights,
    EVERSTREAM_LEVEL::all_finite,
    EVERSTREAM_LEVEL::arg_max,
    EVERSTREAM_LEVEL::block_sums,
    EVERSTREAM_LEVEL::round_int4,
    EVERSTREAM_LEVEL::multiply_add_rate,
    EVERSTREAM_LEVEL::read_rate,
};

}  // namespace everstream
