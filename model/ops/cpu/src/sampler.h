// Draws the next token from its logits; the definition is that of server/engine/sampler.py.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"

namespace everstream {

constexpr int NO_TOKEN = -1, NOT_FINITE = -2;

struct Draw {
    float temperature = 1.0f;
    int top_k = 0;
    float top_p = 1.0f, min_p = 0.0f;
    float repetition_penalty = 1.0f, presence_penalty = 0.0f, frequency_penalty = 0.0f;
    uint64_t seed = 0;
    bool logprob = false;

    bool has_penalty() const {
        return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
    }
};

// What a row got. `logprob` is NaN where it was not wanted, or no token was drawn.
struct Drawn {
    int token = NO_TOKEN;
    double logprob = std::numeric_limits<double>::quiet_NaN();
};

// A number in [0, 1) from (seed, position): two rounds of SplitMix64 (Steele et al. 2014).
double uniform(uint64_t seed, uint64_t position);

// Buffers of one thread, all made at once: what was fed cannot be taken back, so no draw may fail
// for want of memory.
class Sampler {
public:
    Sampler(const Kernels& kernels, int vocab_size);
    // `logits` [vocab_size] are changed by penalties, which look at the tokens `recent`; `logprob`
    // is of the logits as they were.
    Drawn sample(
        float* logits, const Draw& draw, uint64_t position, const int32_t* recent, int num_recent);
    // The natural logarithm of the softmax of `logits` at `token`; NaN where they are not finite.
    double log_probability(const float* logits, int token);

private:
    struct Candidate {
        float weight;
        int32_t token;
    };
    int choose(const float* logits, const Draw& draw, uint64_t position);
    void penalize(float* logits, const Draw& draw, const int32_t* recent, int num_recent);
    int draw_any(double wanted) const;
    int draw_kept(const Draw& draw, double total, double u);
    void collect(float at_least);
    // The candidate at which top_k or top_p is reached, by falling weight and rising token.
    bool find_last(const Draw& draw, double total, Candidate* last);

    const Kernels& kernels_;
    int vocab_size_;
    std::vector<float> weights_, sums_, unpenalized_;
    std::vector<Candidate> candidates_, bucket_;
    std::vector<int32_t> counts_, seen_;
    std::vector<int32_t> bucket_size_;
    std::vector<double> bucket_mass_;
};

}  // namespace everstream
