// RWKV-7 models; the names of weights are those of model/architectures/rwkv7.
#include <algorithm>

#include "family.h"
#include "rwkv7_model.h"

namespace everstream {

namespace {

class Rwkv7Builder {
public:
    Rwkv7Builder(const Options& options, Packer& packer, Precision precision);
    const Rwkv7Model& model() const { return model_; }

private:
    void read_layer(const Options& options, int index);
    LowRank low_rank(const std::string& name);
    Matrix matrix(const std::string& name) { return p_.pack({name}, model_.precision); }

    Packer& p_;
    Rwkv7Model model_;
    Rwkv7Layer* layers_ = nullptr;
};

Rwkv7Builder::Rwkv7Builder(const Options& options, Packer& packer, Precision precision)
    : p_(packer) {
    Rwkv7Model& m = model_;
    read_beginning(m, options, p_, precision);
    m.num_heads = options.integer("num_heads");
    m.head_size = options.integer("head_dim");
    m.group_eps = float(options.number("group_eps"));
    if (p_.has("embedding_norm.weight")) m.embedding_norm = p_.norm("embedding_norm");
    m.layers = layers_ = p_.arena.make<Rwkv7Layer>(m.num_layers);
    for (int i = 0; i < m.num_layers; i++) read_layer(options, i);
    m.intermediate = layers_[0].channel_value.k;
    for (int map = 0; map < LowRanks::num; map++)
        m.rank[map] = layers_[m.num_layers - 1].low[map].down.n;
    m.largest_rank = *std::max_element(m.rank, m.rank + LowRanks::num);
    read_end(m, p_);
}

void Rwkv7Builder::read_layer(const Options& o, int index) {
    Rwkv7Layer& l = layers_[index];
    const std::string block = "blocks." + std::to_string(index) + ".";
    const std::string time = block + "time_mix.", channel = block + "channel_mix.";
    l.time_norm = p_.norm(block + "time_norm");
    l.shift_mix = p_.vector(time + "shift_mix");
    l.receptance = matrix(time + "receptance");
    l.key = matrix(time + "key");
    l.value = matrix(time + "value");
    l.low[LowRanks::decay] = low_rank(time + "decay");
    l.low[LowRanks::rate] = low_rank(time + "rate");
    l.low[LowRanks::value_mix] = low_rank(time + "value_mix");
    l.low[LowRanks::gate] = low_rank(time + "gate");
    l.k_k = p_.vector(time + "k_k");
    l.k_a = p_.vector(time + "k_a");
    l.r_k = p_.vector(time + "r_k");
    l.group_norm = p_.norm(time + "group_norm");
    l.output = matrix(time + "output");
    l.channel_norm = p_.norm(block + "channel_norm");
    l.channel_shift_mix = p_.vector(channel + "shift_mix");
    l.channel_key = matrix(channel + "key");
    l.channel_value = matrix(channel + "value");
    l.S = o.state(index, "S");
    l.time_shift = o.state(index, "time_shift");
    l.channel_shift = o.state(index, "channel_shift");
}

LowRank Rwkv7Builder::low_rank(const std::string& name) {
    if (!p_.has(name + ".down.weight")) return {};
    return {matrix(name + ".down"), matrix(name + ".up")};
}

std::shared_ptr<const Model> build_rwkv7(const Options& options, Packer& packer, Precision precision) {
    return std::make_shared<Rwkv7Model>(Rwkv7Builder(options, packer, precision).model());
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Rwkv7Model&>(model);
    using B = Rwkv7Buffers;
    static_assert(B::num <= MAX_BUFFERS);
    for (int place : {B::r, B::k, B::v, B::v_first, B::decay, B::rate, B::value_mix, B::gate, B::mixed})
        set_buffer(s, place, s.x);
    set_buffer(s, B::shifted, Shifted::num * s.x);
    set_buffer(s, B::low, LowRanks::num * padded_stride(m.largest_rank));
    set_buffer(s, B::hidden, padded_stride(m.intermediate));
    s.widest = std::max(s.x, s.buffers[B::hidden]);
    s.inputs = Shifted::num;
    s.prepared = std::max({s.widest, s.buffers[B::shifted], s.buffers[B::low]});
}

}  // namespace

EVERSTREAM_FAMILY(
    rwkv7, build_rwkv7, set_strides, Precision::float32, Precision::bfloat16, Precision::int8)

}  // namespace everstream
