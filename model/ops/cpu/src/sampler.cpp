#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace everstream {

namespace {

uint64_t split_mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Weights are at most one, so their bits order them; a bucket is an eighth of an octave.
constexpr int NUM_BUCKETS = (0x3F800000 >> 20) + 1;

int bucket_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return std::min(int(bits >> 20), NUM_BUCKETS - 1);
}

}  // namespace

double uniform(uint64_t seed, uint64_t position) {
    return double(split_mix(split_mix(seed) ^ position) >> 11) * 0x1p-53;
}

Sampler::Sampler(const Kernels& kernels, int vocab_size)
    : kernels_(kernels),
      vocab_size_(vocab_size),
      weights_(size_t(vocab_size)),
      sums_(size_t(vocab_size + SAMPLER_BLOCK - 1) / SAMPLER_BLOCK),
      unpenalized_(size_t(vocab_size)),
      counts_(size_t(vocab_size)),
      bucket_size_(NUM_BUCKETS),
      bucket_mass_(NUM_BUCKETS) {
    candidates_.reserve(size_t(vocab_size));
    bucket_.reserve(size_t(vocab_size));
    seen_.reserve(size_t(vocab_size));
}

Drawn Sampler::sample(
    float* logits, const Draw& draw, uint64_t position, const int32_t* recent, int num_recent) {
    if (!kernels_.all_finite(logits, vocab_size_)) return {NOT_FINITE};
    const float* before = logits;
    if (num_recent && draw.has_penalty()) {
        if (draw.logprob) {
            std::copy_n(logits, vocab_size_, unpenalized_.data());
            before = unpenalized_.data();
        }
        penalize(logits, draw, recent, num_recent);
    }
    Drawn drawn{choose(logits, draw, position)};
    if (draw.logprob) drawn.logprob = log_probability(before, drawn.token);
    return drawn;
}

int Sampler::choose(const float* logits, const Draw& draw, uint64_t position) {
    const int n = vocab_size_;
    if (draw.temperature == 0.0f) return kernels_.arg_max(logits, n);
    kernels_.softmax_weights(logits, n, 1.0f / draw.temperature, weights_.data());
    kernels_.block_sums(weights_.data(), n, sums_.data());
    double total = 0;
    for (float sum : sums_) total += double(sum);
    const double u = uniform(draw.seed, position);
    const bool restricted =
        (draw.top_k > 0 && draw.top_k < n) || draw.top_p < 1.0f || draw.min_p > 0.0f;
    return restricted ? draw_kept(draw, total, u) : draw_any(u * total);
}

double Sampler::log_probability(const float* logits, int token) {
    const int n = vocab_size_;
    if (!kernels_.all_finite(logits, n)) return std::numeric_limits<double>::quiet_NaN();
    kernels_.softmax_weights(logits, n, 1.0f, weights_.data());
    kernels_.block_sums(weights_.data(), n, sums_.data());
    double total = 0;
    for (float sum : sums_) total += double(sum);
    const float top = logits[kernels_.arg_max(logits, n)];
    return double(logits[token]) - double(top) - std::log(total);
}

void Sampler::penalize(
    float* logits, const Draw& draw, const int32_t* recent, int num_recent) {
    seen_.clear();
    for (int i = 0; i < num_recent; i++)
        if (recent[i] < vocab_size_ && counts_[size_t(recent[i])]++ == 0)
            seen_.push_back(recent[i]);
    for (int32_t token : seen_) {
        float& x = logits[token];
        x = x > 0 ? x / draw.repetition_penalty : x * draw.repetition_penalty;
        x -= draw.presence_penalty + draw.frequency_penalty * float(counts_[size_t(token)]);
        counts_[size_t(token)] = 0;
    }
}

// The first token whose running sum of weights passes `wanted`.
int Sampler::draw_any(double wanted) const {
    double sum = 0;
    size_t block = 0;
    while (block + 1 < sums_.size() && sum + double(sums_[block]) <= wanted)
        sum += double(sums_[block++]);
    const int begin = int(block) * SAMPLER_BLOCK, end = std::min(begin + SAMPLER_BLOCK, vocab_size_);
    int last = begin;
    for (int i = begin; i < end; i++) {
        if (weights_[size_t(i)] == 0.0f) continue;
        last = i;
        sum += double(weights_[size_t(i)]);
        if (sum > wanted) break;
    }
    return last;
}

int Sampler::draw_kept(const Draw& draw, double total, double u) {
    // Few tokens are looked at first: what top_p surely drops is not, and for top_k a guess is made.
    float cut = draw.min_p;
    if (draw.top_p < 1.0f)
        cut = std::max(cut, float((1.0 - double(draw.top_p)) * total / vocab_size_ * 0.5));
    if (draw.top_k > 0) cut = std::max(cut, 1e-3f);
    Candidate last;
    collect(cut);
    if (!find_last(draw, total, &last)) {
        collect(draw.min_p);
        if (!find_last(draw, total, &last)) last = {0.0f, vocab_size_};
    }
    const auto kept = [last](const Candidate& c) {
        return c.weight > last.weight || (c.weight == last.weight && c.token <= last.token);
    };
    double mass = 0, sum = 0;
    for (const Candidate& c : candidates_)
        if (kept(c)) mass += double(c.weight);
    int token = 0;
    for (const Candidate& c : candidates_) {
        if (!kept(c)) continue;
        token = c.token;
        sum += double(c.weight);
        if (sum > u * mass) break;
    }
    return token;
}

void Sampler::collect(float at_least) {
    candidates_.clear();
    for (int begin = 0; begin < vocab_size_; begin += SAMPLER_BLOCK) {
        if (sums_[size_t(begin / SAMPLER_BLOCK)] < at_least) continue;
        const int end = std::min(begin + SAMPLER_BLOCK, vocab_size_);
        for (int i = begin; i < end; i++)
            if (weights_[size_t(i)] >= at_least) candidates_.push_back({weights_[size_t(i)], i});
    }
}

bool Sampler::find_last(const Draw& draw, double total, Candidate* last) {
    std::fill(bucket_size_.begin(), bucket_size_.end(), 0);
    std::fill(bucket_mass_.begin(), bucket_mass_.end(), 0.0);
    for (const Candidate& c : candidates_) {
        bucket_size_[size_t(bucket_of(c.weight))]++;
        bucket_mass_[size_t(bucket_of(c.weight))] += double(c.weight);
    }
    const int64_t max_count = draw.top_k > 0 ? draw.top_k : vocab_size_;
    const double max_mass = draw.top_p < 1.0f ? double(draw.top_p) * total : INFINITY;
    int64_t count = 0;
    double mass = 0;
    for (size_t b = NUM_BUCKETS; b-- > 0;) {
        if (count + bucket_size_[b] < max_count && mass + bucket_mass_[b] < max_mass) {
            count += bucket_size_[b];
            mass += bucket_mass_[b];
            continue;
        }
        bucket_.clear();
        for (const Candidate& c : candidates_)
            if (bucket_of(c.weight) == int(b)) bucket_.push_back(c);
        std::sort(bucket_.begin(), bucket_.end(), [](const Candidate& x, const Candidate& y) {
            return x.weight != y.weight ? x.weight > y.weight : x.token < y.token;
        });
        for (const Candidate& c : bucket_) {
            *last = c;
            mass += double(c.weight);
            if (++count >= max_count || mass >= max_mass) return true;
        }
    }
    return false;
}

}  // namespace everstream
