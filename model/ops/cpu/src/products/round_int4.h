// Rounds weights to int4, the same codes and scales at every level: nothing here is fused.
//
// The number of the largest size becomes -8, as in GGUF's Q4_0, or another integer with which a
// group's numbers are int4 already: so they stay as they are.
#pragma once

#include "runtime/model.h"
#include "products/numeric.h"

namespace everstream {
namespace EVERSTREAM_LEVEL {

// What the largest number may be of groups that are int4, after -8.
constexpr float OTHERS[] = {7, -7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1};

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
        scale_ = half(largest / F::set(-8.0f));
        F error = error_of(scale_);
        for (float to : OTHERS) {
            if (are_zero(error)) break;
            const F scale = half(largest / F::set(to)), misfit = scale * F::set(to) - largest;
            if (none_is_zero(misfit)) continue;
            const F other = error_of(scale);
            scale_ = select_less(zero, other, scale_, scale);
            error = min(other, error);
        }
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
    // Rounded to float16.
    static F half(F scale) {
        uint16_t halves[F::W];
        scale.store_half(halves);
        return F::half(halves);
    }
    // The sum of all sizes of what is lost.
    F error_of(F scale) const {
        const F zero = F::set(0.0f), by = inverse(scale);
        F error = zero;
        for (int i = 0; i < GROUP; i++) {
            const F left = number(i) - step(i, by) * scale;
            error = error + max(left, zero - left);
        }
        return error;
    }
    static bool are_zero(F x) {
        float lanes[F::W];
        x.store(lanes);
        for (float lane : lanes)
            if (lane != 0.0f) return false;
        return true;
    }
    static bool none_is_zero(F x) {
        float lanes[F::W];
        x.store(lanes);
        for (float lane : lanes)
            if (lane == 0.0f) return false;
        return true;
    }

    const float (&x_)[GROUP][F::W];
    F scale_;
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
