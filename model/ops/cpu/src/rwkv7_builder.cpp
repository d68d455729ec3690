// RWKV-7 models; the names of weights are those of model/architectures/rwkv7.
#include <algorithm>
#include <new>

#include "builder.h"
#include "rwkv7_model.h"

namespace everstream {

namespace {

class Rwkv7Builder {
public:
    Rwkv7Builder(const Options& options, Packer& packer, Precision precision);
    const Rwkv7Model& model() const { return model_; }

private:
    void read_options(const Options& options);
    void read_layer(const Options& options, int index);
    LowRank low_rank(const std::string& name, int rank, bool has_bias);
    Matrix matrix(const std::string& name, int64_t n, int64_t k, bool has_bias = false);
    const float* vector(const std::string& name, const std::vector<int64_t>& shape);
    Norm norm(const std::string& name);

    Packer& p_;
    Rwkv7Model model_;
    Rwkv7Layer* layers_ = nullptr;
};

Rwkv7Builder::Rwkv7Builder(const Options& options, Packer& packer, Precision precision)
    : p_(packer) {
    Rwkv7Model& m = model_;
    m.family = Family::rwkv7;
    m.precision = precision;
    m.layer_norm = true;
    read_options(options);
    m.embedding = p_.table("embedding.weight", m.vocab_size, m.hidden, precision);
    if (options.integer("embedding_norm")) m.embedding_norm = norm("embedding_norm");
    layers_ = new (p_.arena.allocate<Rwkv7Layer>(size_t(m.num_layers)))
        Rwkv7Layer[size_t(m.num_layers)];
    m.layers = layers_;
    for (int i = 0; i < m.num_layers; i++) read_layer(options, i);
    m.norm = norm("norm");
    m.head = matrix("head", m.vocab_size, m.hidden);
}

void Rwkv7Builder::read_options(const Options& o) {
    Rwkv7Model& m = model_;
    m.vocab_size = o.integer("vocab_size");
    m.hidden = o.integer("hidden_size");
    m.num_layers = o.integer("num_layers");
    m.num_heads = o.integer("num_heads");
    m.head_size = o.integer("head_dim");
    m.intermediate = o.integer("intermediate_size");
    m.rank[LowRanks::decay] = o.integer("decay_rank");
    m.rank[LowRanks::rate] = o.integer("rate_rank");
    m.rank[LowRanks::value_mix] = o.integer("value_rank");
    m.rank[LowRanks::gate] = o.integer("gate_rank");
    m.largest_rank = *std::max_element(m.rank, m.rank + LowRanks::num);
    m.eps = float(o.number("eps"));
    m.group_eps = float(o.number("group_eps"));
    m.state_bytes = size_t(o.number("state_bytes"));
}

void Rwkv7Builder::read_layer(const Options& o, int index) {
    const Rwkv7Model& m = model_;
    Rwkv7Layer& l = layers_[index];
    const std::string block = "blocks." + std::to_string(index) + ".";
    const std::string time = block + "time_mix.", channel = block + "channel_mix.";
    const int64_t D = m.hidden, F = m.intermediate;
    l.time_norm = norm(block + "time_norm");
    l.shift_mix = vector(time + "shift_mix", {Shifted::num, D});
    l.receptance = matrix(time + "receptance", D, D);
    l.key = matrix(time + "key", D, D);
    l.value = matrix(time + "value", D, D);
    l.low[LowRanks::decay] = low_rank(time + "decay", m.rank[LowRanks::decay], true);
    l.low[LowRanks::rate] = low_rank(time + "rate", m.rank[LowRanks::rate], true);
    if (index > 0)
        l.low[LowRanks::value_mix] = low_rank(time + "value_mix", m.rank[LowRanks::value_mix], true);
    l.low[LowRanks::gate] = low_rank(time + "gate", m.rank[LowRanks::gate], false);
    l.k_k = vector(time + "k_k", {D});
    l.k_a = vector(time + "k_a", {D});
    l.r_k = vector(time + "r_k", {m.num_heads, m.head_size});
    l.group_norm = norm(time + "group_norm");
    l.output = matrix(time + "output", D, D);
    l.channel_norm = norm(block + "channel_norm");
    l.channel_shift_mix = vector(channel + "shift_mix", {D});
    l.channel_key = matrix(channel + "key", F, D);
    l.channel_value = matrix(channel + "value", D, F);
    l.S = o.state(index, "S");
    l.time_shift = o.state(index, "time_shift");
    l.channel_shift = o.state(index, "channel_shift");
}

LowRank Rwkv7Builder::low_rank(const std::string& name, int rank, bool has_bias) {
    const int64_t D = model_.hidden;
    return {matrix(name + ".down", rank, D), matrix(name + ".up", D, rank, has_bias)};
}

Matrix Rwkv7Builder::matrix(const std::string& name, int64_t n, int64_t k, bool has_bias) {
    return p_.pack({{name, n, k, has_bias}}, model_.precision);
}

const float* Rwkv7Builder::vector(const std::string& name, const std::vector<int64_t>& shape) {
    return p_.copy(p_.weight(name, shape));
}

Norm Rwkv7Builder::norm(const std::string& name) {
    return {vector(name + ".weight", {model_.hidden}), vector(name + ".bias", {model_.hidden})};
}

}  // namespace

std::shared_ptr<const Model> build_rwkv7(const Options& options, Packer& packer, Precision precision) {
    return std::make_shared<Rwkv7Model>(Rwkv7Builder(options, packer, precision).model());
}

}  // namespace everstream
