#include "runtime/runtime.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "runtime/levels.h"

namespace everstream {

namespace {

// Rows of a score have logits all at once, so that a long text is fed in parts of so many tokens.
constexpr int MAX_PART = 128;

Feed part_of(Feed feed, int begin) {
    feed.position += begin;
    feed.tokens += begin;
    feed.num_tokens = std::min(feed.num_tokens - begin, MAX_PART);
    return feed;
}

}  // namespace

void Runtime::Buffer::reserve(size_t bytes) {
    if (bytes <= size_) return;
    memory_.assign(bytes + 64, 0);
    size_ = bytes;
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    aligned_ = memory_.data() + ((at + 63) / 64 * 64 - at);
}

Runtime::Runtime(
    const Options& options, const Weights& weights, const std::string& level, Precision precision,
    int num_threads, int num_ids, const Model* base)
    : kernels_(kernels_of(level)),
      built_(build(options, weights, kernels_, precision, base)),
      strides_(strides_of(*built_.family, model())),
      num_ids_(num_ids),
      team_(num_threads) {
    private_.resize(size_t(num_threads));
    for (Buffer& buffer : private_) {
        buffer.reserve(family().private_bytes(model(), strides_));
        private_rooms_.push_back(buffer.as<char>());
        samplers_.emplace_back(kernels_, num_ids);
    }
}

void Runtime::reserve(int rows, int wanted) {
    const auto r = size_t(rows);
    const auto floats = [r](int stride) { return r * size_t(stride) * sizeof(float); };
    x_.reserve(floats(strides_.x));
    normed_.reserve(floats(strides_.x));
    for (int i = 0; i < strides_.num_buffers; i++) {
        own_[i].reserve(floats(strides_.buffers[i]));
        own_data_[i] = own_[i].data();
    }
    half_.reserve(floats(strides_.prepared) / 2);
    // Of any level: two bytes a number, and the sums.
    integers_.reserve(r * size_t(strides_.prepared * 2 + strides_.prepared / 3 + strides_.inputs * 24));
    scales_.reserve(floats(strides_.inputs));
    logits_.reserve(size_t(wanted) * size_t(strides_.vocab) * sizeof(float));
}

void Runtime::check_bound(const Feed& feed) const {
    const int64_t bound = model().max_positions, end = feed.position + feed.num_tokens;
    if (!bound || end <= bound) return;
    throw std::invalid_argument(
        "a text of " + std::to_string(end) + " tokens is beyond the context of " +
        std::to_string(bound));
}

Batch Runtime::gather(const std::vector<Feed>& feeds, bool all_rows) {
    tokens_.clear(), positions_.clear(), first_row_.clear(), wanted_.clear();
    states_.clear(), sources_.clear(), pasts_.clear();
    for (const Feed& feed : feeds) {
        first_row_.push_back(int32_t(tokens_.size()));
        states_.push_back(feed.state);
        sources_.push_back(feed.source ? feed.source : feed.state);
        pasts_.push_back(feed.past ? feed.past : feed.state);
        for (int i = 0; i < feed.num_tokens; i++) {
            if (all_rows || i + feed.num_draws >= feed.num_tokens)
                wanted_.push_back(int32_t(tokens_.size()));
            tokens_.push_back(feed.tokens[i]);
            positions_.push_back(feed.position + i);
        }
    }
    first_row_.push_back(int32_t(tokens_.size()));
    num_logits_ = int(wanted_.size());
    reserve(int(tokens_.size()), num_logits_);

    Batch b;
    b.strides = strides_;
    b.num_rows = int(tokens_.size());
    b.num_sequences = int(feeds.size());
    b.num_wanted = num_logits_;
    b.middle_row = first_row_[feeds.size() / 2];
    for (const Feed& feed : feeds) b.most_rows = std::max(b.most_rows, int(feed.num_tokens));
    b.tokens = tokens_.data();
    b.positions = positions_.data();
    b.first_row = first_row_.data();
    b.states = states_.data();
    b.sources = sources_.data();
    b.pasts = pasts_.data();
    b.wanted = wanted_.data();
    b.logits = logits_.data();
    b.x = x_.data();
    b.normed = normed_.data();
    b.buffers = own_data_;
    b.half = half_.as<uint16_t>();
    b.integers = integers_.as<uint8_t>();
    b.scales = scales_.data();
    b.private_room = private_rooms_.data();
    return b;
}

Scores Runtime::score(const Feed& feed, const int32_t* next, int num_next, int num_top) {
    check_bound(feed);
    Scores scores;
    scores.num_top = std::min(num_top, num_ids_);
    scores.logprobs.resize(size_t(num_next));
    scores.tops.resize(size_t(num_next) * size_t(scores.num_top));
    for (int begin = 0; begin < feed.num_tokens; begin += MAX_PART) {
        const Feed part = part_of(feed, begin);
        const Batch b = gather({part}, true);
        const int num = std::min(num_next - begin, part.num_tokens);
        team_.run([&scores, this, b, begin, num, next](Worker& w) {
            family().forward(model(), b, w);
            w.each(num, [&](int i) {
                const auto at = size_t(begin + i), num_top = size_t(scores.num_top);
                scores.logprobs[at] = samplers_[size_t(w.index())].log_probability(
                    logits(i), next[at], scores.tops.data() + at * num_top, int(num_top));
            });
        });
    }
    return scores;
}

std::vector<double> Runtime::embed(const Feed& feed) {
    check_bound(feed);
    std::vector<double> sums(size_t(model().hidden));
    for (int begin = 0; begin < feed.num_tokens; begin += MAX_PART) {
        Batch b = gather({part_of(feed, begin)}, true);
        b.stops_at_norm = true;
        num_logits_ = 0;
        team_.run([this, b](Worker& w) { family().forward(model(), b, w); });
        for (int row = 0; row < b.num_rows; row++) {
            const float* hidden = b.normed + size_t(row) * size_t(strides_.x);
            for (size_t i = 0; i < sums.size(); i++)
                sums[i] += std::nearbyint(double(hidden[i]) * 0x1p24) * 0x1p-24;
        }
    }
    return sums;
}

void Runtime::prepare_draws(const std::vector<Feed>& feeds) {
    drawing_.clear();
    first_drawn_.assign(1, 0);
    first_top_.assign(1, 0);
    for (const Feed& feed : feeds) {
        for (int after = feed.num_draws; after-- > 0;) {
            drawing_.push_back({&feed, after});
            first_top_.push_back(
                first_top_.back() + size_t(std::min(feed.draw->num_top, num_ids_)));
        }
        first_drawn_.push_back(drawing_.size());
    }
    drawn_.assign(drawing_.size(), Drawn());
    tops_.assign(first_top_.back(), Likely());
}

Drawn Runtime::draw(
    const Drawing& drawing, float* logits, Likely* top, Sampler& sampler) const {
    const Feed& feed = *drawing.feed;
    const int num_seen = std::max(0, feed.num_recent - drawing.num_after);
    const int window = feed.draw->penalty_window;
    const int num_recent = window ? std::min(num_seen, window) : num_seen;
    Place at;
    at.position = uint64_t(feed.position + feed.draw_offset + feed.num_tokens - drawing.num_after);
    at.recent = feed.recent + (num_seen - num_recent);
    at.num_recent = num_recent;
    if (feed.allowed) at.allowed = feed.allowed[feed.num_draws - 1 - drawing.num_after];
    return sampler.sample(logits, *feed.draw, at, top);
}

void Runtime::hidden(int first, int num, float* out) const {
    const Model& m = model();
    const auto n = size_t(m.hidden);
    for (int row = first; row < first + num; row++, out += n) {
        const float* x = x_.data() + size_t(row) * size_t(strides_.x);
        double squares = 0.0;
        for (size_t i = 0; i < n; i++) squares += double(x[i]) * double(x[i]);
        const auto by = float(1.0 / std::sqrt(squares / double(n) + double(m.eps)));
        for (size_t i = 0; i < n; i++) out[i] = x[i] * by * m.norm.weight[i];
    }
}

void Runtime::run(const std::vector<Feed>& feeds, const float* hidden) {
    for (const Feed& feed : feeds) check_bound(feed);
    Batch b = gather(feeds, false);
    b.hidden = hidden;
    // All memory is taken before the first state changes: nothing after that can fail.
    prepare_draws(feeds);
    team_.run([this, b](Worker& w) {
        family().forward(model(), b, w);
        w.each(b.num_wanted, [&](int i) {
            const auto at = size_t(i);
            float* logits = b.logits + at * size_t(strides_.vocab);
            drawn_[at] = draw(
                drawing_[at], logits, tops_.data() + first_top_[at], samplers_[size_t(w.index())]);
        });
    });
}

}  // namespace everstream
