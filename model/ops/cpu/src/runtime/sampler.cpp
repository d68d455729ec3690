#include "runtime/sampler.h"

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

// The bits of numbers that are not negative order them; a bucket is an eighth of an octave.
int octave_bucket(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return int(bits >> 20);
}
constexpr int NUM_OCTAVE_BUCKETS = (0x7F800000 >> 20) + 1;

// Of weights, which are at most one.
constexpr int NUM_BUCKETS = (0x3F800000 >> 20) + 1;
int bucket_of(float weight) { return std::min(octave_bucket(weight), NUM_BUCKETS - 1); }

// No token with it is drawn where another one can be, and it leaves logits finite.
constexpr double MAX_DRY_PENALTY = 1000.0;

// By products, which have the same bits everywhere; a power has not.
double dry_penalty(const Dry& dry, int length) {
    double penalty = dry.multiplier;
    for (int i = dry.allowed_length; i < length && penalty < MAX_DRY_PENALTY; i++)
        penalty *= dry.base;
    return std::min(penalty, MAX_DRY_PENALTY);
}

// Another number at each position than that of the draw.
constexpr uint64_t XTC_STREAM = 0xA0761D6478BD642Fu;

bool excludes_top_choices(const Draw& draw, uint64_t position) {
    // Two tokens cannot both have more than half.
    return draw.xtc_probability > 0.0 && draw.xtc_threshold <= 0.5 &&
           uniform(draw.seed ^ XTC_STREAM, position) < draw.xtc_probability;
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
      before_(size_t(vocab_size)),
      counts_(size_t(vocab_size)),
      bucket_size_(NUM_BUCKETS),
      bucket_mass_(NUM_BUCKETS),
      near_mass_(NUM_OCTAVE_BUCKETS) {
    candidates_.reserve(size_t(vocab_size));
    bucket_.reserve(size_t(vocab_size));
    seen_.reserve(size_t(vocab_size));
}

Drawn Sampler::sample(float* logits, const Draw& draw, const Place& at, Likely* top) {
    if (!kernels_.all_finite(logits, vocab_size_)) return {NOT_FINITE};
    const bool penalized = at.num_recent && draw.has_penalty();
    const bool drops_far = draw.top_n_sigma > 0.0 && draw.temperature != 0.0f;
    const float* before = logits;
    if (draw.logprob && (penalized || !draw.bias.empty() || at.allowed || drops_far)) {
        std::copy_n(logits, vocab_size_, before_.data());
        before = before_.data();
    }
    for (const auto& [token, value] : draw.bias)
        if (token < vocab_size_) logits[token] += value;
    if (penalized) penalize(logits, draw, at.recent, at.num_recent);
    if (at.allowed) forbid(logits, at.allowed);
    if (drops_far) drop_far(logits, draw.top_n_sigma);
    Drawn drawn{choose(logits, draw, at.position)};
    if (draw.logprob) drawn.logprob = log_probability(before, drawn.token, top, draw.num_top);
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
    const bool excludes = excludes_top_choices(draw, position);
    const bool restricted = excludes ||
        (draw.top_k > 0 && draw.top_k < n) || draw.top_p < 1.0f || draw.min_p > 0.0f ||
        draw.typical_p < 1.0f;
    if (!restricted) return draw_any(u * total);
    keep_likely(draw, total);
    if (draw.typical_p < 1.0f) keep_typical(logits, draw);
    if (excludes) drop_top_choices(draw.xtc_threshold);
    return draw_kept(u);
}

double Sampler::log_probability(const float* logits, int token, Likely* top, int num_top) {
    const int n = vocab_size_;
    if (!kernels_.all_finite(logits, n)) return std::numeric_limits<double>::quiet_NaN();
    kernels_.softmax_weights(logits, n, 1.0f, weights_.data());
    kernels_.block_sums(weights_.data(), n, sums_.data());
    double total = 0;
    for (float sum : sums_) total += double(sum);
    const float largest = logits[kernels_.arg_max(logits, n)];
    const double log_total = std::log(total);
    const auto at = [=](int i) { return double(logits[i]) - double(largest) - log_total; };
    num_top = std::min(num_top, n);
    most_likely(logits, top, num_top);
    for (int i = 0; i < num_top; i++) top[i].logprob = at(top[i].token);
    return at(token);
}

void Sampler::most_likely(const float* logits, Likely* top, int num_top) const {
    int count = 0;
    float least = -INFINITY;
    for (int token = 0; num_top > 0 && token < vocab_size_; token++) {
        const float x = logits[token];
        if (count == num_top && x <= least) continue;
        int i = count < num_top ? count++ : num_top - 1;
        for (; i > 0 && logits[top[i - 1].token] < x; i--) top[i] = top[i - 1];
        top[i].token = token;
        least = logits[top[count - 1].token];
    }
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
    if (draw.dry.multiplier > 0.0) penalize_repetition(logits, draw.dry, recent, num_recent);
}

// A token that came before ends a repetition of the `length` tokens before it, if these are also
// the last ones of the text. The longest counts for each token.
void Sampler::penalize_repetition(
    float* logits, const Dry& dry, const int32_t* recent, int num_recent) {
    const int num = std::min(num_recent, dry.last_n);
    recent += num_recent - num;
    const auto breaks = [&](int32_t token) {
        return std::find(dry.breakers.begin(), dry.breakers.end(), token) != dry.breakers.end();
    };
    int longest = 0;
    while (longest < num && !breaks(recent[num - 1 - longest])) longest++;
    if (longest < dry.allowed_length) return;
    seen_.clear();
    for (int next = 1; next < num; next++) {
        const int most = std::min(next, longest);
        int length = 0;
        while (length < most && recent[next - 1 - length] == recent[num - 1 - length]) length++;
        if (length < dry.allowed_length || recent[next] >= vocab_size_) continue;
        int32_t& found = counts_[size_t(recent[next])];
        if (found == 0) seen_.push_back(recent[next]);
        found = std::max(found, length);
    }
    for (int32_t token : seen_) {
        logits[token] -= float(dry_penalty(dry, counts_[size_t(token)]));
        counts_[size_t(token)] = 0;
    }
}

void Sampler::forbid(float* logits, const uint32_t* allowed) const {
    for (int begin = 0; begin < vocab_size_; begin += 32) {
        const uint32_t word = allowed[begin / 32];
        if (word == ~uint32_t(0)) continue;
        const int end = std::min(begin + 32, vocab_size_);
        for (int i = begin; i < end; i++)
            if (!(word >> (i - begin) & 1)) logits[i] = -INFINITY;
    }
}

// What is further below the largest than `num_sigmas` standard deviations of the finite logits. The
// sums are of distances from the largest: they are exact where all are equal. Each addition waits
// for the one before it, so there are several sums, always the same ones.
void Sampler::drop_far(float* logits, double num_sigmas) const {
    constexpr int NUM_SUMS = 8;
    const double largest = double(logits[kernels_.arg_max(logits, vocab_size_)]);
    double sums[NUM_SUMS] = {}, squares[NUM_SUMS] = {};
    int count = 0;
    const auto add = [&](float x, int j) {
        const bool finite = x != -INFINITY;
        const double distance = finite ? largest - double(x) : 0.0;
        sums[j] += distance;
        squares[j] += distance * distance;
        count += finite;
    };
    int begin = 0;
    for (; begin + NUM_SUMS <= vocab_size_; begin += NUM_SUMS)
        for (int j = 0; j < NUM_SUMS; j++) add(logits[begin + j], j);
    for (int j = 0; begin + j < vocab_size_; j++) add(logits[begin + j], j);
    double sum = 0.0, square = 0.0;
    for (int j = 0; j < NUM_SUMS; j++) sum += sums[j], square += squares[j];
    const double mean = sum / count;
    const double most = num_sigmas * std::sqrt(std::max(square / count - mean * mean, 0.0));
    for (int i = 0; i < vocab_size_; i++)
        if (largest - double(logits[i]) > most) logits[i] = -INFINITY;
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

int Sampler::draw_kept(double u) const {
    double mass = 0, sum = 0;
    for (const Candidate& c : candidates_) mass += double(c.weight);
    int token = 0;
    for (const Candidate& c : candidates_) {
        token = c.token;
        sum += double(c.weight);
        if (sum > u * mass) break;
    }
    return token;
}

void Sampler::keep_likely(const Draw& draw, double total) {
    if (draw.top_k == 0 && draw.top_p >= 1.0f) return collect(draw.min_p);
    // Few tokens are looked at first: what top_p surely drops is not, and for top_k a guess is made.
    float cut = draw.min_p;
    if (draw.top_p < 1.0f)
        cut = std::max(cut, float((1.0 - double(draw.top_p)) * total / vocab_size_ * 0.5));
    if (draw.top_k > 0) cut = std::max(cut, 1e-3f);
    Candidate last;
    collect(cut);
    if (!find_last(draw, total, &last)) {
        collect(draw.min_p);
        if (!find_last(draw, total, &last)) return;
    }
    const auto dropped = [last](const Candidate& c) {
        return c.weight < last.weight || (c.weight == last.weight && c.token > last.token);
    };
    candidates_.erase(
        std::remove_if(candidates_.begin(), candidates_.end(), dropped), candidates_.end());
}

// |-log p - entropy| is how far the logit over the temperature is from its mean: the logarithm of
// the softmax's sum is in both and falls out.
void Sampler::keep_typical(const float* logits, const Draw& draw) {
    const double by = 1.0 / double(draw.temperature);
    double mass = 0, mean = 0;
    for (const Candidate& c : candidates_) {
        mass += double(c.weight);
        mean += double(c.weight) * double(logits[c.token]);
    }
    mean /= mass;
    const auto distance = [=](const Candidate& c) {
        return float(std::abs(double(logits[c.token]) - mean) * by);
    };
    std::fill(near_mass_.begin(), near_mass_.end(), 0.0);
    for (const Candidate& c : candidates_)
        near_mass_[size_t(octave_bucket(distance(c)))] += double(c.weight);
    const double wanted = double(draw.typical_p) * mass;
    double sum = 0;
    size_t b = 0;
    // One token is kept at least, also where typical_p is so small that it is zero as a float.
    const auto passed = [&] { return near_mass_[b] == 0.0 || sum + near_mass_[b] < wanted; };
    while (b + 1 < near_mass_.size() && passed()) sum += near_mass_[b++];
    // Only the bucket in which the sum is reached is sorted; in `bucket_` a weight is a distance.
    bucket_.clear();
    for (const Candidate& c : candidates_)
        if (octave_bucket(distance(c)) == int(b)) bucket_.push_back({distance(c), c.token});
    const auto nearer = [](const Candidate& x, const Candidate& y) {
        return x.weight != y.weight ? x.weight < y.weight : x.token < y.token;
    };
    std::sort(bucket_.begin(), bucket_.end(), nearer);
    Candidate last = {INFINITY, vocab_size_};
    for (const Candidate& c : bucket_) {
        last = c;
        sum += double(weights_[size_t(c.token)]);
        if (sum >= wanted) break;
    }
    const auto dropped = [=](const Candidate& c) { return nearer(last, {distance(c), c.token}); };
    candidates_.erase(
        std::remove_if(candidates_.begin(), candidates_.end(), dropped), candidates_.end());
}

// Of the tokens that have `threshold` of the mass or more only the least likely one stays.
void Sampler::drop_top_choices(double threshold) {
    double mass = 0;
    for (const Candidate& c : candidates_) mass += double(c.weight);
    const double least = threshold * mass;
    const Candidate* last = nullptr;
    for (const Candidate& c : candidates_)
        if (double(c.weight) >= least && (!last || c.weight <= last->weight)) last = &c;
    if (!last) return;
    const int32_t kept = last->token;
    const auto dropped = [=](const Candidate& c) {
        return double(c.weight) >= least && c.token != kept;
    };
    candidates_.erase(
        std::remove_if(candidates_.begin(), candidates_.end(), dropped), candidates_.end());
}

void Sampler::collect(float at_least) {
    // Never what cannot be drawn: a weight of zero is that of a token that is not allowed, or nearly.
    at_least = std::max(at_least, std::numeric_limits<float>::min());
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
