// RWKV-7 models; the names of weights are those of model/families/rwkv7.
#include "families/rwkv7/model.h"
#include "families/rwkv7/time_mix_builder.h"

namespace everstream {

static ChannelMix read_channel_mix(
    const Options& o, Packer& p, Precision precision, int index, const std::string& block) {
    const std::string channel = block + "channel_mix.";
    ChannelMix l;
    l.norm = p.norm(block + "channel_norm");
    l.shift_mix = p.vector(channel + "shift_mix");
    l.key = p.pack({channel + "key"}, precision);
    l.value = p.pack({channel + "value"}, precision);
    l.shift = o.state(index, "channel_shift");
    return l;
}

static std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<Rwkv7Model>();
    read_beginning(*m, o, p, precision);
    read_time_mix_sizes(*m, o);
    if (p.has("embedding_norm.weight")) m->embedding_norm = p.norm("embedding_norm");
    auto* time_mixes = p.arena.make<TimeMix>(m->num_layers);
    auto* channel_mixes = p.arena.make<ChannelMix>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) {
        const std::string block = "blocks." + std::to_string(i) + ".";
        time_mixes[i] = read_time_mix(p, o, i, block + "time_norm", block + "time_mix.", precision);
        channel_mixes[i] = read_channel_mix(o, p, precision, i, block);
    }
    set_time_mixes(*m, time_mixes);
    m->channel_mixes = channel_mixes;
    m->intermediate = channel_mixes[0].value.k;
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
