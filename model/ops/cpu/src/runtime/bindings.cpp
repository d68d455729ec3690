// The extension module model.ops.cpu._native. Its callers are in runtime.py, which checks types
// and values first; here only what would touch foreign memory is checked again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "runtime/levels.h"
#include "runtime/precisions.h"
#include "runtime/processor.h"
#include "runtime/runtime.h"

namespace nb = nanobind;

namespace everstream {

void bind_training(nb::module_& m);  // in training/bindings.cpp

namespace {

using FloatArray = nb::ndarray<const float, nb::numpy, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<const uint8_t, nb::numpy, nb::c_contig, nb::device::cpu>;
using Hidden = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const uint32_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pool = nb::ndarray<uint8_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using State = nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Options options_of(const nb::dict& values, const nb::list& states) {
    Options options;
    for (auto [key, value] : values) {
        const auto name = nb::cast<std::string>(key);
        if (nb::isinstance<nb::str>(value))
            options.names[name] = nb::cast<std::string>(value);
        else
            options.numbers[name] = nb::cast<double>(value);
    }
    for (nb::handle layer : states) {
        auto& offsets = options.states.emplace_back();
        for (auto [key, value] : nb::cast<nb::dict>(layer))
            offsets[nb::cast<std::string>(key)] = nb::cast<size_t>(value);
    }
    return options;
}

// `source` has has(name), shape(name), held_as(name) and blocks(name, begin, end), and
// source(name, begin, end) gives rows; see runtime.py.
Weights weights_of(const nb::callable& source) {
    Weights weights;
    weights.has = [source](const std::string& name) {
        return nb::cast<bool>(source.attr("has")(name));
    };
    weights.shape = [source](const std::string& name) {
        return nb::cast<std::vector<int64_t>>(source.attr("shape")(name));
    };
    weights.held_as = [source](const std::string& name) {
        return held_precision_of(nb::cast<std::string>(source.attr("held_as")(name)));
    };
    weights.blocks = [source](const std::string& name, int64_t begin, int64_t end) {
        auto array = nb::cast<ByteArray>(source.attr("blocks")(name, begin, end));
        Blocks blocks;
        blocks.data = array.data(), blocks.num_bytes = array.nbytes();
        blocks.keep = std::make_shared<ByteArray>(std::move(array));
        return blocks;
    };
    weights.rows = [source](const std::string& name, int64_t begin, int64_t end) {
        auto array = nb::cast<FloatArray>(source(name, begin, end));
        Weight weight;
        weight.data = array.data();
        for (size_t i = 0; i < array.ndim(); i++) weight.shape.push_back(int64_t(array.shape(i)));
        weight.keep = std::make_shared<FloatArray>(std::move(array));
        return weight;
    };
    return weights;
}

// A Python value as a T; std::invalid_argument where it is none.
template <class T>
T checked(nb::handle value, const char* name) {
    T result{};
    if (!nb::try_cast(value, result))
        throw std::invalid_argument(std::string(name) + " has another type or is out of range");
    return result;
}

// A token id; checked, since it indexes tables.
int32_t checked_id(nb::handle value, int vocab_size) {
    const auto id = checked<int64_t>(value, "a token id");
    if (id < 0 || id >= vocab_size) throw std::invalid_argument("a token id is out of range");
    return int32_t(id);
}

// The ids of a Python sequence.
void append_ids(nb::handle sequence, int vocab_size, std::vector<int32_t>& out) {
    for (nb::handle item : sequence) out.push_back(checked_id(item, vocab_size));
}

// Appends the words of a mask over `num_ids` ids, which must allow one of them.
void append_mask(nb::handle value, int num_ids, std::vector<uint32_t>& out) {
    Mask mask;
    if (!nb::try_cast(value, mask, false))
        throw std::invalid_argument("a mask is not a contiguous array [words] of uint32");
    const size_t num_words = (size_t(num_ids) + 31) / 32;
    if (mask.shape(0) < num_words) throw std::invalid_argument("a mask has too few words");
    const uint32_t* words = mask.data();
    const uint32_t last = words[num_words - 1] & (~uint32_t(0) >> (32 * num_words - size_t(num_ids)));
    if (!last && std::all_of(words, words + num_words - 1, [](uint32_t w) { return w == 0; }))
        throw std::invalid_argument("a mask allows no token");
    out.insert(out.end(), words, words + num_words);
}

nb::list list_of(const Likely* tops, size_t num) {
    nb::list list;
    for (size_t i = 0; i < num && tops[i].token != NO_TOKEN; i++)
        list.append(nb::make_tuple(tops[i].token, tops[i].logprob));
    return list;
}

int checked_num_top(int num_top) {
    if (num_top < 0 || num_top > MAX_TOP)
        throw std::invalid_argument("so many of the likeliest tokens are not kept");
    return num_top;
}

class PythonRuntime {
public:
    PythonRuntime(
        const nb::dict& options, const nb::list& states, const nb::callable& weights,
        const std::string& level, const std::string& precision, int num_threads, int num_ids,
        const PythonRuntime* base)
        : runtime_(
              options_of(options, states), weights_of(weights), level, precision_of(precision),
              num_threads, num_ids, base ? &base->runtime_.model() : nullptr),
          num_ids_(num_ids) {}

    nb::list run(
        Pool pool, const nb::list& slots, const nb::list& positions, const nb::list& tokens,
        const nb::list& draws, const nb::object& recents, const nb::object& allowed,
        const nb::object& num_draws, const nb::object& sources, const nb::object& targets,
        const nb::object& hidden, int64_t draw_offset) {
        const size_t n = nb::len(slots);
        const auto differs = [n](const nb::object& list) { return !list.is_none() && nb::len(list) != n; };
        if (nb::len(positions) != n || nb::len(tokens) != n || nb::len(draws) != n ||
            differs(recents) || differs(allowed) || differs(num_draws) || differs(sources) ||
            differs(targets))
            throw std::invalid_argument("lists of different lengths");
        if (pool.shape(1) != runtime_.model().state_bytes)
            throw std::invalid_argument("the pool's blocks have another size than a state");
        feeds_.assign(n, Feed());
        ids_.clear();
        starts_.clear();
        words_.clear();
        masks_.clear();
        first_mask_.assign(n, NO_MASK);
        const int vocab_size = runtime_.model().vocab_size;
        last_call_.resize(pool.shape(0));
        num_calls_++;
        for (size_t i = 0; i < n; i++) {
            Feed& feed = feeds_[i];
            const auto slot = checked<size_t>(slots[i], "a slot");
            if (slot >= pool.shape(0)) throw std::invalid_argument("a slot is out of range");
            if (last_call_[slot] == num_calls_) throw std::invalid_argument("a slot is given twice");
            last_call_[slot] = num_calls_;
            feed.past = (char*)pool.data() + slot * pool.shape(1);
            feed.state = state_of(sources, i, feed.past);
            feed.source = feed.state;
            feed.state = state_of(targets, i, feed.state);
            feed.position = checked<int64_t>(positions[i], "a position");
            feed.draw_offset = draw_offset;
            if (feed.position < 0) throw std::invalid_argument("a position is negative");
            starts_.push_back(ids_.size());
            append_ids(tokens[i], vocab_size, ids_);
            feed.num_tokens = int(ids_.size() - starts_.back());
            if (feed.num_tokens == 0) throw std::invalid_argument("a sequence has no token");
            starts_.push_back(ids_.size());
            nb::handle draw = draws[i];
            if (draw.is_none()) continue;
            feed.draw = checked<const Draw*>(draw, "a draw");
            feed.num_draws = num_draws.is_none() ? 1 : checked<int>(num_draws[i], "a number of draws");
            if (feed.num_draws < 0 || feed.num_draws > feed.num_tokens)
                throw std::invalid_argument("a number of draws is more than the tokens, or negative");
            if (!recents.is_none() && feed.draw->has_penalty() && feed.num_draws)
                append_recent(recents[i], feed);
            if (!allowed.is_none() && feed.num_draws) append_masks(allowed[i], i);
        }
        check_states();
        mask_data_.clear();
        for (size_t begin : masks_)
            mask_data_.push_back(begin == NO_MASK ? nullptr : words_.data() + begin);
        for (size_t i = 0; i < n; i++) {
            feeds_[i].tokens = ids_.data() + starts_[2 * i];
            feeds_[i].recent = ids_.data() + starts_[2 * i + 1];
            if (first_mask_[i] != NO_MASK) feeds_[i].allowed = mask_data_.data() + first_mask_[i];
        }
        const float* rows = checked_hidden(hidden);
        {
            const nb::gil_scoped_release release;
            runtime_.run(feeds_, rows);
        }
        return by_feed([this](size_t draw) { return nb::int_(runtime_.drawn()[draw].token); });
    }

    nb::tuple score(
        Pool pool, size_t slot, int64_t position, const nb::object& tokens,
        const nb::object& following, int num_top, const nb::object& source) {
        checked_num_top(num_top);
        Feed feed = feed_of(pool, slot, position, tokens, source);
        if (!following.is_none()) ids_.push_back(checked_id(following, num_ids_));
        if (ids_.size() < 2) throw std::invalid_argument("no token id to score");
        for (size_t i = 1; i < ids_.size(); i++)
            if (ids_[i] >= num_ids_) throw std::invalid_argument("a token id is out of range");
        feed.tokens = ids_.data();
        const Scores scores = [&] {
            const nb::gil_scoped_release release;
            return runtime_.score(feed, ids_.data() + 1, int(ids_.size() - 1), num_top);
        }();
        nb::list tops;
        for (size_t i = 0; i < scores.logprobs.size(); i++)
            tops.append(list_of(
                scores.tops.data() + i * size_t(scores.num_top), size_t(scores.num_top)));
        return nb::make_tuple(scores.logprobs, tops);
    }

    nb::object embed(
        Pool pool, size_t slot, int64_t position, const nb::object& tokens, const nb::object& source) {
        Feed feed = feed_of(pool, slot, position, tokens, source);
        feed.tokens = ids_.data();
        const std::vector<double> sums = [&] {
            const nb::gil_scoped_release release;
            return runtime_.embed(feed);
        }();
        auto* copy = new double[sums.size()];
        std::copy(sums.begin(), sums.end(), copy);
        nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<double*>(p); });
        return nb::cast(nb::ndarray<nb::numpy, double>(copy, {sums.size()}, owner));
    }

    nb::object hidden(int first, int num) const {
        if (first < 0 || num < 0 || num > runtime_.num_rows() - first)
            throw std::invalid_argument("the last run has no such rows");
        if (runtime_.model().norm.bias) throw std::invalid_argument("the final norm is a LayerNorm");
        const auto n = size_t(runtime_.model().hidden);
        auto* copy = new float[size_t(num) * n + 1];
        runtime_.hidden(first, num, copy);
        nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<float*>(p); });
        return nb::cast(nb::ndarray<nb::numpy, float>(copy, {size_t(num), n}, owner));
    }

    nb::list logprobs() const {
        return by_feed([this](size_t draw) { return nb::float_(runtime_.drawn()[draw].logprob); });
    }

    nb::list top_logprobs() const {
        const std::vector<size_t>& first = runtime_.first_top();
        return by_feed([this, &first](size_t draw) {
            return list_of(runtime_.tops().data() + first[draw], first[draw + 1] - first[draw]);
        });
    }

    nb::object logits() const {
        const auto rows = size_t(runtime_.num_logits()), n = size_t(runtime_.model().vocab_size);
        auto* copy = new float[rows * n + 1];
        for (size_t i = 0; i < rows; i++)
            std::memcpy(copy + i * n, runtime_.logits(int(i)), n * sizeof(float));
        nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<float*>(p); });
        return nb::cast(nb::ndarray<nb::numpy, float>(copy, {rows, n}, owner));
    }

    std::string level() const { return runtime_.kernels().name; }
    bool rounds_inputs() const { return runtime_.kernels().has_dot; }
    size_t num_bytes() const { return runtime_.num_bytes(); }
    int num_threads() const { return runtime_.num_threads(); }

private:
    // What `item` gives for each draw of the last run, in a list for each feed.
    template <class Item>
    nb::list by_feed(Item item) const {
        const std::vector<size_t>& first = runtime_.first_drawn();
        nb::list feeds;
        for (size_t i = 0; i + 1 < first.size(); i++) {
            nb::list draws;
            for (size_t draw = first[i]; draw < first[i + 1]; draw++) draws.append(item(draw));
            feeds.append(draws);
        }
        return feeds;
    }

    // The tokens that the penalties of a feed look at; its own ones are the last of `ids_`.
    void append_recent(nb::handle recent, Feed& feed) {
        if (recent.is_none()) return;
        append_ids(recent, runtime_.model().vocab_size, ids_);
        feed.num_recent = int(ids_.size() - starts_.back());
        if (feed.num_recent < feed.num_draws - 1)
            throw std::invalid_argument("fewer recent tokens than draws");
    }

    // The masks of feed i, one for each of its draws.
    void append_masks(nb::handle masks, size_t i) {
        if (masks.is_none()) return;
        if (!nb::isinstance<nb::sequence>(masks) || nb::len(masks) != size_t(feeds_[i].num_draws))
            throw std::invalid_argument("masks are not a sequence with one for each draw");
        first_mask_[i] = masks_.size();
        for (nb::handle mask : masks) {
            masks_.push_back(mask.is_none() ? NO_MASK : words_.size());
            if (!mask.is_none()) append_mask(mask, num_ids_, words_);
        }
    }

    // The memory of a state without its past: `value`, or where it is none, `otherwise`.
    char* checked_state(nb::handle value, char* otherwise) const {
        if (value.is_none()) return otherwise;
        State state;
        if (!nb::try_cast(value, state, false) || state.shape(0) < runtime_.model().fixed_bytes)
            throw std::invalid_argument("a state is not a contiguous array of its bytes");
        return (char*)state.data();
    }
    char* state_of(const nb::object& states, size_t i, char* otherwise) const {
        return states.is_none() ? otherwise : checked_state(states[i], otherwise);
    }

    // Of hidden states a row for each token of a run; or null.
    const float* checked_hidden(const nb::object& hidden) const {
        if (hidden.is_none()) return nullptr;
        size_t num_rows = 0;
        for (const Feed& feed : feeds_) num_rows += size_t(feed.num_tokens);
        Hidden rows;
        if (!nb::try_cast(hidden, rows, false) || rows.shape(0) != num_rows ||
            rows.shape(1) != size_t(runtime_.model().hidden))
            throw std::invalid_argument("hidden states are not a contiguous array [tokens, width]");
        return rows.data();  // the caller holds the array
    }

    // No two feeds may write one state, nor one read what another writes.
    void check_states() {
        addresses_.clear();
        for (const Feed& feed : feeds_) {
            addresses_.push_back(feed.state);
            if (feed.source != feed.state) addresses_.push_back(feed.source);
        }
        std::sort(addresses_.begin(), addresses_.end());
        if (std::adjacent_find(addresses_.begin(), addresses_.end()) != addresses_.end())
            throw std::invalid_argument("a state is given twice");
    }

    // A row that draws nothing; its tokens are at the beginning of `ids_`.
    Feed feed_of(
        const Pool& pool, size_t slot, int64_t position, const nb::object& tokens,
        const nb::object& source) {
        ids_.clear();
        append_ids(tokens, runtime_.model().vocab_size, ids_);
        if (slot >= pool.shape(0) || pool.shape(1) != runtime_.model().state_bytes || position < 0 ||
            ids_.empty())
            throw std::invalid_argument("no such slot, or no token to feed");
        Feed feed;
        feed.past = (char*)pool.data() + slot * pool.shape(1);
        feed.state = checked_state(source, feed.past);
        feed.position = position;
        feed.num_tokens = int(ids_.size());
        return feed;
    }

    static constexpr size_t NO_MASK = ~size_t(0);
    Runtime runtime_;
    int num_ids_;
    std::vector<Feed> feeds_;
    std::vector<int32_t> ids_;
    std::vector<size_t> starts_;
    std::vector<uint32_t> words_;
    std::vector<size_t> masks_;       // where each begins in `words_`
    std::vector<size_t> first_mask_;  // of each feed
    std::vector<const uint32_t*> mask_data_;
    std::vector<const char*> addresses_;  // of states
    std::vector<uint64_t> last_call_;     // of each slot
    uint64_t num_calls_ = 0;
};

}  // namespace
}  // namespace everstream

NB_MODULE(_native, m) {
    // A runtime may live as long as the process.
    nanobind::set_leak_warnings(false);
    using namespace everstream;
    m.attr("NOT_FINITE") = NOT_FINITE;
    m.attr("HELD_KINDS") = gguf_names();
    m.def("levels", &levels);
    m.def("built_levels", &built_levels);
    m.def("processor_levels", &processor_levels);
    m.def("families", &families);
    bind_training(m);
    m.def("uniform", &uniform, nb::arg("seed"), nb::arg("position"));
    m.def(
        "read_bandwidth", &read_bandwidth, nb::arg("bytes"), nb::arg("seconds"), nb::arg("threads"),
        nb::arg("level") = "", nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "multiply_add_rate",
        [](double seconds, int threads, const std::string& precision, const std::string& level) {
            return multiply_add_rate(seconds, threads, precision_of(precision), level);
        },
        nb::arg("seconds"), nb::arg("threads"), nb::arg("precision"), nb::arg("level") = "",
        nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Draw>(m, "Draw")
        .def(
            "__init__",
            [](Draw* self, float temperature, int top_k, float top_p, float min_p, float typical_p,
               double top_n_sigma, double xtc_probability, double xtc_threshold,
               float repetition_penalty, float presence_penalty, float frequency_penalty,
               double dry_multiplier, double dry_base, int dry_allowed_length,
               int dry_penalty_last_n, std::vector<int32_t> dry_breakers,
               std::vector<std::pair<int32_t, float>> logit_bias, uint64_t seed, bool logprob,
               int num_top, int penalty_window) {
                checked_num_top(num_top);
                if (penalty_window < 0) throw std::invalid_argument("penalty_window is negative");
                if (dry_allowed_length < 1 || dry_penalty_last_n < 0)
                    throw std::invalid_argument("dry_allowed_length is at least 1, last_n 0");
                for (const auto& [token, value] : logit_bias)
                    if (token < 0 || !std::isfinite(value))
                        throw std::invalid_argument("logit_bias is not finite numbers by token id");
                Dry dry{dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n,
                        std::move(dry_breakers)};
                new (self) Draw{temperature, top_k, top_p, min_p, typical_p, top_n_sigma,
                                xtc_probability, xtc_threshold, repetition_penalty,
                                presence_penalty, frequency_penalty, std::move(dry),
                                std::move(logit_bias), seed, logprob || num_top > 0, num_top,
                                penalty_window};
            },
            nb::kw_only(), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
            nb::arg("min_p"), nb::arg("typical_p"), nb::arg("top_n_sigma"),
            nb::arg("xtc_probability"), nb::arg("xtc_threshold"), nb::arg("repetition_penalty"),
            nb::arg("presence_penalty"), nb::arg("frequency_penalty"), nb::arg("dry_multiplier"),
            nb::arg("dry_base"), nb::arg("dry_allowed_length"), nb::arg("dry_penalty_last_n"),
            nb::arg("dry_breakers"), nb::arg("logit_bias"), nb::arg("seed"), nb::arg("logprob"),
            nb::arg("num_top"), nb::arg("penalty_window"))
        .def_prop_ro("has_penalty", &Draw::has_penalty);
    m.def(
        "sample",
        [](const FloatArray& logits, const Draw& draw, uint64_t position, const nb::list& recent,
           const nb::object& allowed) {
            std::vector<float> copy(logits.data(), logits.data() + logits.size());
            std::vector<int32_t> ids;
            append_ids(recent, int(copy.size()), ids);
            std::vector<uint32_t> words;
            if (!allowed.is_none()) append_mask(allowed, int(copy.size()), words);
            std::vector<Likely> top(size_t(draw.num_top));
            Sampler sampler(kernels_of(""), int(copy.size()));
            const Place at{
                position, ids.data(), int(ids.size()), words.empty() ? nullptr : words.data()};
            return sampler.sample(copy.data(), draw, at, top.data()).token;
        },
        nb::arg("logits"), nb::arg("draw"), nb::arg("position"), nb::arg("recent"),
        nb::arg("allowed").none() = nb::none());
    nb::class_<PythonRuntime>(m, "Runtime")
        .def(
            nb::init<
                const nb::dict&, const nb::list&, const nb::callable&, const std::string&,
                const std::string&, int, int, const PythonRuntime*>(),
            nb::arg("options"), nb::arg("states"), nb::arg("weights"), nb::arg("level"),
            nb::arg("precision"), nb::arg("num_threads"), nb::arg("num_ids"),
            nb::arg("base").none() = nb::none(), nb::keep_alive<1, 9>())
        .def(
            "run", &PythonRuntime::run, nb::arg("pool").noconvert(), nb::arg("slots"), nb::arg("positions"),
            nb::arg("tokens"), nb::arg("draws"), nb::arg("recents").none(), nb::arg("allowed").none(),
            nb::arg("num_draws").none(), nb::arg("sources").none() = nb::none(),
            nb::arg("targets").none() = nb::none(), nb::arg("hidden").none() = nb::none(),
            nb::arg("draw_offset") = 0)
        .def("hidden", &PythonRuntime::hidden, nb::arg("first"), nb::arg("num"))
        .def(
            "score", &PythonRuntime::score, nb::arg("pool").noconvert(), nb::arg("slot"), nb::arg("position"),
            nb::arg("tokens"), nb::arg("following").none(), nb::arg("num_top"),
            nb::arg("source").none() = nb::none())
        .def(
            "embed", &PythonRuntime::embed, nb::arg("pool").noconvert(), nb::arg("slot"), nb::arg("position"),
            nb::arg("tokens"), nb::arg("source").none() = nb::none())
        .def("logprobs", &PythonRuntime::logprobs)
        .def("top_logprobs", &PythonRuntime::top_logprobs)
        .def("logits", &PythonRuntime::logits)
        .def_prop_ro("level", &PythonRuntime::level)
        .def_prop_ro("rounds_inputs", &PythonRuntime::rounds_inputs)
        .def_prop_ro("num_bytes", &PythonRuntime::num_bytes)
        .def_prop_ro("num_threads", &PythonRuntime::num_threads);
}
