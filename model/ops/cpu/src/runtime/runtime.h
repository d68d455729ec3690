// A model ready to run: packed weights, a team of threads and their buffers.
#pragma once

#include <string>

#include "runtime/family.h"
#include "runtime/sampler.h"

namespace everstream {

// One sequence's part of a run.
struct Feed {
    char* state = nullptr;
    // Where the state is before the run and then stays as it was; null: in `state`.
    const char* source = nullptr;
    // The state that has the past, which is written in place; null: `state`.
    char* past = nullptr;
    int64_t position = 0;
    int64_t draw_offset = 0;  // of the positions of draws to those of the state
    const int32_t* tokens = nullptr;
    int num_tokens = 0;
    const Draw* draw = nullptr;
    int num_draws = 0;  // tokens to draw, one after each of the last so many tokens
    // The sequence's last tokens with these, for the last draw; each draw before it sees one less.
    const int32_t* recent = nullptr;
    int num_recent = 0;
    // Null, or [num_draws]: a bit for each id, or null: all are allowed.
    const uint32_t* const* allowed = nullptr;
};

// What `score` says of each token: its log probability, and the likeliest in its place.
struct Scores {
    std::vector<double> logprobs;
    std::vector<Likely> tops;  // [tokens][num_top]
    int num_top = 0;
};

class Runtime {
public:
    // `num_ids`: tokens that may be drawn, at most the model's vocabulary. `base` outlives this.
    Runtime(
        const Options& options, const Weights& weights, const std::string& level,
        Precision precision, int num_threads, int num_ids, const Model* base = nullptr);

    // Feeds every sequence its tokens and draws where wanted: see drawn(). Not thread safe. Where it
    // throws, no state has changed. This and what follows throw std::invalid_argument for a feed
    // beyond the model's `max_positions`. `hidden` is that of Batch.
    void run(const std::vector<Feed>& feeds, const float* hidden = nullptr);

    // What the final norm gives for `num` of the last run's rows, from `first` on: [num][width].
    void hidden(int first, int num, float* out) const;
    int num_rows() const { return int(tokens_.size()); }

    // Feeds the sequence its tokens and returns log p(next[i] | all up to tokens[i]) for the first
    // `num_next` of them, at most all; NaN where logits are not finite. Draws nothing. With them the
    // `num_top` likeliest ids, or all where there are fewer.
    Scores score(const Feed& feed, const int32_t* next, int num_next, int num_top);

    // Feeds the sequence its tokens and returns the sum of what the final norm gives for each,
    // [hidden], in multiples of 2^-24. So a double adds them exactly, and any cut gives the same.
    std::vector<double> embed(const Feed& feed);

    // Of the last run: what was drawn, a token or NOT_FINITE each; that of feed i from
    // first_drawn()[i] on, up to where that of the next one begins.
    const std::vector<Drawn>& drawn() const { return drawn_; }
    const std::vector<size_t>& first_drawn() const { return first_drawn_; }
    // And the likeliest tokens of draw j, as many as it wanted, from first_top()[j] on.
    const std::vector<Likely>& tops() const { return tops_; }
    const std::vector<size_t>& first_top() const { return first_top_; }

    const Model& model() const { return *built_.model; }
    const Kernels& kernels() const { return kernels_; }
    size_t num_bytes() const { return built_.arena.num_bytes(); }
    int num_threads() const { return team_.size(); }
    // The logits of the last run, as bias, penalties and mask left them.
    const float* logits(int row) const { return logits_.data() + size_t(row) * size_t(strides_.vocab); }
    int num_logits() const { return num_logits_; }

private:
    class Buffer {
    public:
        void reserve(size_t bytes);
        template <class T>
        T* as() const { return reinterpret_cast<T*>(aligned_); }
        float* data() const { return as<float>(); }

    private:
        std::vector<char> memory_;
        char* aligned_ = nullptr;
        size_t size_ = 0;
    };

    // A draw of a run: the last of its feed, or so many before it.
    struct Drawing {
        const Feed* feed;
        int num_after;
    };

    void reserve(int rows, int wanted);
    // Takes all memory that the draws of a run need.
    void prepare_draws(const std::vector<Feed>& feeds);
    Drawn draw(const Drawing& drawing, float* logits, Likely* top, Sampler& sampler) const;
    // Throws std::invalid_argument where the model's past has no place for the tokens.
    void check_bound(const Feed& feed) const;
    // The batch of all feeds, with the logits of the rows after which they draw, or of all rows.
    Batch gather(const std::vector<Feed>& feeds, bool all_rows);

    const FamilyKernels& family() const {
        return *built_.family->kernels[int(kernels_.level)];
    }

    const Kernels& kernels_;
    BuiltModel built_;
    Strides strides_;
    std::vector<Sampler> samplers_;
    std::vector<Buffer> private_;
    std::vector<char*> private_rooms_;
    Buffer x_, normed_, half_, integers_, scales_, logits_;
    Buffer own_[MAX_BUFFERS];  // of the model's family
    float* own_data_[MAX_BUFFERS] = {};
    std::vector<int32_t> tokens_, first_row_, wanted_;
    std::vector<int64_t> positions_;
    std::vector<char*> states_, pasts_;
    std::vector<const char*> sources_;
    std::vector<Drawing> drawing_;
    std::vector<Drawn> drawn_;
    std::vector<Likely> tops_;
    std::vector<size_t> first_drawn_, first_top_;
    int num_ids_;
    int num_logits_ = 0;
    Team team_;  // the last member: its threads end before what they use
};

}  // namespace everstream
