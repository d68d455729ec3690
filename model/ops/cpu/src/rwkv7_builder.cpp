// RWKV-7 models; the names of weights are those of model/architectures/rwkv7.
#include "rwkv7_model.h"
#include "time_mix_builder.h"

namespace everstream {

static Rwkv7Layer read_layer(const Options& o, Packer& p, Precision precision, int index) {
    Rwkv7Layer l;
    const std::string block = "blocks." + std::to_string(index) + ".";
    const std::string channel = block + "channel_mix.";
    l.time_norm = p.norm(block + "time_norm");
    l.time_mix = read_time_mix(p, o, index, block + "time_mix.", precision);
    l.channel_norm = p.norm(block + "channel_norm");
    l.channel_shift_mix = p.vector(channel + "shift_mix");
    l.channel_key = p.pack({channel + "key"}, precision);
    l.channel_value = p.pack({channel + "value"}, precision);
    l.channel_shift = o.state(index, "channel_shift");
    return l;
}

static std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<Rwkv7Model>();
    read_beginning(*m, o, p, precision);
    read_time_mix_sizes(*m, o);
    if (p.has("embedding_norm.weight")) m->embedding_norm = p.norm("embedding_norm");
    auto* layers = p.arena.make<Rwkv7Layer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) layers[i] = read_layer(o, p, precision, i);
    m->layers = layers;
    m->intermediate = layers[0].channel_value.k;
    set_ranks(*m, layers[m->num_layers - 1].time_mix);
    read_end(*m, p);
    return m;
}

static void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Rwkv7Model&>(model);
    set_time_mix_strides(m, m.intermediate, s);
}

EVERSTREAM_FAMILY(
    rwkv7, build, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
