// Draws the next token from its logits; the definition is that of server/engine/torch_runner.py.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "runtime/kernels.h"

namespace everstream {

constexpr int NO_TOKEN = -1, NOT_FINITE = -2;

constexpr int MAX_TOP = 20;

// DRY: what each token loses that would continue a repetition. Off where the multiplier is 0.
struct Dry {
    double multiplier = 0.0, base = 1.75;
    int allowed_length = 2;
    int last_n = 0;                  // how many of the last tokens are looked at
    std::vector<int32_t> breakers;  // a repetition has none of them
};

struct Draw {
    float temperature = 1.0f;
    int top_k = 0;
    float top_p = 1.0f, min_p = 0.0f, typical_p = 1.0f;
    double top_n_sigma = 0.0, xtc_probability = 0.0, xtc_threshold = 0.1;
    float repetition_penalty = 1.0f, presence_penalty = 0.0f, frequency_penalty = 0.0f;
    Dry dry;
    std::vector<std::pair<int32_t, float>> bias;  // by token
    uint64_t seed = 0;
    bool logprob = false;
    int num_top = 0;         // with `logprob`: of the most likely tokens, at most MAX_TOP
    int penalty_window = 0;  // how many last tokens the penalties look at; 0: all that are given

    bool has_penalty() const {
        return repetition_penalty != 1.0f || presence_penalty != 0.0f ||
               frequency_penalty != 0.0f || dry.multiplier > 0.0;
    }
};

// What a row got. `logprob` is NaN where it was not wanted, or no token was drawn.
struct Drawn {
    int token = NO_TOKEN;
    double logprob = std::numeric_limits<double>::quiet_NaN();
};

// What a draw depends on, apart from its parameters and the logits.
struct Place {
    uint64_t position = 0;
    const int32_t* recent = nullptr;  // the tokens that penalties look at
    int num_recent = 0;
    const uint32_t* allowed = nullptr;  // a bit for each token that may come; null: all may
};

// A token and its log probability; no token where the logits are not finite.
struct Likely {
    int32_t token = NO_TOKEN;
    double logprob = 0.0;
};

// A number in [0, 1) from (seed, position): two rounds of SplitMix64 (Steele et al. 2014).
double uniform(uint64_t seed, uint64_t position);

// Buffers of one thread, all made at once: what was fed cannot be taken back, so no draw may fail
// for want of memory.
class Sampler {
public:
    Sampler(const Kernels& kernels, int vocab_size);
    // `logits` [vocab_size] are changed by bias, penalties, mask and top_n_sigma; `logprob` is of
    // the logits as they were, and so are the likeliest tokens, which go to `top`
    // [min(draw.num_top, vocab_size)].
    Drawn sample(float* logits, const Draw& draw, const Place& at, Likely* top = nullptr);
    // The natural logarithm of the softmax of `logits` at `token`; NaN where they are not finite.
    // With it the `num_top` likeliest, at most all, best first and then by token.
    double log_probability(
        const float* logits, int token, Likely* top = nullptr, int num_top = 0);

private:
    struct Candidate {
        float weight;
        int32_t token;
    };
    int choose(const float* logits, const Draw& draw, uint64_t position);
    void penalize(float* logits, const Draw& draw, const int32_t* recent, int num_recent);
    void penalize_repetition(
        float* logits, const Dry& dry, const int32_t* recent, int num_recent);
    void forbid(float* logits, const uint32_t* allowed) const;
    void drop_far(float* logits, double num_sigmas) const;
    void most_likely(const float* logits, Likely* top, int num_top) const;
    int draw_any(double wanted) const;
    int draw_kept(double u) const;
    // What the filters keep becomes `candidates_`, in the order of their tokens.
    void keep_likely(const Draw& draw, double total);
    void keep_typical(const float* logits, const Draw& draw);
    void drop_top_choices(double threshold);
    void collect(float at_least);
    // The candidate at which top_k or top_p is reached, by falling weight and rising token.
    bool find_last(const Draw& draw, double total, Candidate* last);

    const Kernels& kernels_;
    int vocab_size_;
    std::vector<float> weights_, sums_, before_;
    std::vector<Candidate> candidates_, bucket_;
    std::vector<int32_t> counts_, seen_;
    std::vector<int32_t> bucket_size_;
    std::vector<double> bucket_mass_, near_mass_;
};

}  // namespace everstream
