// Rounds weights to int4, the same codes and scales at every level: nothing here is fused.
//
// A group's scale is the one of some candidates, and of the least squares fit to the best one's
// codes, with the smallest squared error. The candidates are the number of the largest size over
// what it may become: an integer, so that a group that is int4 already keeps its numbers (those of
// GGUF's Q4_0 are), and quarters between -9 and -7, of which the search by llama.cpp's
// make_qx_quants has tenths.
#pragma once

#include "model.h"
#include "numeric.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

constexpr float CANDIDATES[] = {-8, -7.75, -7.5, -7.25, -7, -8.25, -8.5, -8.75, -9, -6, -5,
                                -4, -3,    -2,   -1,    1,  2,     3,    4,     5,  6,  7};

// One group in each lane.
class RoundedGroups {
public:
    // numbers[i][lane] are those of the lane's group.
    explicit RoundedGroups(const float (&numbers)[GROUP][F::W]) : x_(numbers) {
        const F zero = F::set(0.0f);
        F largest = zero, size = zero, finite = zero;
        for (int i = 0; i < GROUP; i++) {
            const F x = number(i), a = max(x, zero - x);
            largest = select_less(size, a, x, largest);
            size = max(a, size);
            finite = finite + x * zero;
        }
        scale_ = zero, error_ = F::set(INFINITY);
        for (float to : CANDIDATES) {
            consider(largest / F::set(to));
            if (are_exact()) break;
        }
        consider(fitted());
        // A group that is not finite must not look finite afterwards.
        scale_ = scale_ + finite;
    }

    void store_scales(uint16_t* scales) const { scale_.store_half(scales); }
    // The codes of the numbers i, [W].
    void store_codes(int i, uint32_t* codes) const {
        const F code = step(i, inverse(scale_)) + F::set(8.0f);
        float t[F::W];
        code.store(t);
        for (int lane = 0; lane < F::W; lane++) codes[lane] = uint32_t(int32_t(t[lane])) & 15;
    }

private:
    F number(int i) const { return F::load(x_[i]); }
    // What the numbers i become, from -8 to 7.
    F step(int i, F inverse) const {
        const F magic = F::set(12582912.0f);
        return min(max(number(i) * inverse, F::set(-8.0f)), F::set(7.0f)) + magic - magic;
    }
    static F inverse(F scale) {
        const F zero = F::set(0.0f), size = max(scale, zero - scale);
        return select_less(zero, size, F::set(1.0f) / scale, zero);
    }
    void consider(F wanted) {
        uint16_t halves[F::W];
        wanted.store_half(halves);
        const F scale = F::half(halves), by = inverse(scale);
        F error = F::set(0.0f);
        for (int i = 0; i < GROUP; i++) {
            const F left = number(i) - step(i, by) * scale;
            error = error + left * left;
        }
        scale_ = select_less(error, error_, scale, scale_);
        error_ = min(error, error_);
    }
    F fitted() const {
        const F by = inverse(scale_);
        F products = F::set(0.0f), squares = F::set(0.0f);
        for (int i = 0; i < GROUP; i++) {
            const F code = step(i, by);
            products = products + number(i) * code;
            squares = squares + code * code;
        }
        return select_less(F::set(0.0f), squares, products / squares, scale_);
    }
    bool are_exact() const {
        float errors[F::W], sum = 0.0f;
        error_.store(errors);
        for (float error : errors) sum += error;
        return sum == 0.0f;
    }

    const float (&x_)[GROUP][F::W];
    F scale_, error_;
};

// See Kernels::round_int4.
inline void round_int4(const float* row, int k, uint32_t* words, uint16_t* scales) {
    const int groups = (k + GROUP - 1) / GROUP;
    for (int first = 0; first < groups; first += F::W) {
        const int num = groups - first < F::W ? groups - first : F::W;
        float numbers[GROUP][F::W] = {};
        for (int g = 0; g < num; g++)
            for (int i = 0, at = (first + g) * GROUP; i < GROUP && at + i < k; i++)
                numbers[i][g] = row[at + i];
        const RoundedGroups rounded(numbers);
        uint16_t halves[F::W];
        rounded.store_scales(halves);
        std::memcpy(scales + first, halves, size_t(num) * 2);
        std::memset(words + first * (GROUP / 8), 0, size_t(num) * (GROUP / 8) * 4);
        for (int i = 0; i < GROUP; i++) {
            uint32_t codes[F::W];
            rounded.store_codes(i, codes);
            const int shift = i % 4 * 8 + i % 8 / 4 * 4;
            for (int g = 0; g < num; g++)
                words[(first + g) * (GROUP / 8) + i / 8] |= codes[g] << shift;
        }
    }
}

}  // namespace EVERSTREAM_LEVEL
}  // namespace everstream
