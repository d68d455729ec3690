// Qwen3.5 models; the names of weights are those of model/families/qwen35.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "families/bounded/builder.h"
#include "families/qwen35/model.h"

namespace everstream {

namespace {

DeltaNet read_delta(const Qwen35Model& m, const Options& o, Packer& p, int layer, const std::string& mixer) {
    DeltaNet l;
    l.in = p.pack({mixer + "qkv", mixer + "z"}, m.precision);
    if (l.in.n != m.channels() + m.values())
        throw std::invalid_argument("weight '" + mixer + "qkv.weight' has another shape");
    l.rates = p.pack({mixer + "b", mixer + "a"}, Precision::float32);
    l.out = p.pack({mixer + "out"}, m.precision);
    l.conv = p.transposed(p.weight(mixer + "conv"), 1);
    const Weight log_rate = p.weight(mixer + "A_log");
    float* rate = p.arena.allocate<float>(size_t(m.num_value_heads));
    for (int i = 0; i < m.num_value_heads; i++) rate[i] = float(-std::exp(double(log_rate.data[i])));
    l.decay_rate = rate;
    l.bias = p.vector(mixer + "dt_bias");
    l.norm = p.vector(mixer + "norm.weight");
    l.ring = o.state(layer, "conv");
    l.S = o.state(layer, "S");
    return l;
}

std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<Qwen35Model>();
    read_beginning(*m, o, p, precision);
    read_bounded(*m, o, p, true);
    m->num_key_heads = o.integer("num_key_heads");
    m->num_value_heads = o.integer("num_value_heads");
    m->key_size = o.integer("key_head_dim");
    m->value_size = o.integer("value_head_dim");
    m->conv_size = o.integer("conv_size");
    if (m->num_value_heads % m->num_key_heads)
        throw std::invalid_argument("num_value_heads is no multiple of num_key_heads");
    auto* layers = p.arena.make<Qwen35Layer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) {
        read_bounded_layer(*m, o, p, i, layers[i], [&](const std::string& mixer) {
            layers[i].delta = read_delta(*m, o, p, i, mixer);
        });
    }
    m->layers = layers;
    if (p.has("join.weight")) {
        m->embedding_norm = p.norm("embedding_norm");
        m->hidden_norm = p.norm("hidden_norm");
        m->join = p.pack({"join"}, precision);
        if (m->join.n != m->hidden || m->join.k != 2 * m->hidden)
            throw std::invalid_argument("weight 'join.weight' has another shape");
    }
    read_end(*m, p);
    return m;
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Qwen35Model&>(model);
    using B = Qwen35Buffers;
    static_assert(B::num <= MAX_BUFFERS);
    set_buffer(s, B::rates, padded_stride(2 * m.num_value_heads));
    set_buffer(s, B::mixed, padded_stride(m.values()));
    set_buffer(s, B::joined, m.joins() ? padded_stride(2 * m.hidden) : 0);
    s.widest = std::max(s.buffers[B::mixed], s.buffers[B::joined]);
    set_bounded_strides(m, s, m.layers[0].mlp.down.k);
    s.buffers[B::in] = std::max(s.buffers[B::in], padded_stride(m.channels() + m.values()));
}

}  // namespace

EVERSTREAM_FAMILY(
    qwen35, build, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
