// ARWKV models; the names of weights are those of model/families/rwkv7.
#include "families/arwkv7/model.h"
#include "families/rwkv7/time_mix_builder.h"

namespace everstream {

static std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<Arwkv7Model>();
    read_beginning(*m, o, p, precision);
    read_time_mix_sizes(*m, o);
    auto* time_mixes = p.arena.make<TimeMix>(m->num_layers);
    auto* mlps = p.arena.make<Mlp>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) {
        const std::string block = "blocks." + std::to_string(i) + ".";
        time_mixes[i] = read_time_mix(p, o, i, block + "mixer_norm", block + "mixer.", precision);
        mlps[i] = read_mlp(p, block, precision);
    }
    set_time_mixes(*m, time_mixes);
    m->mlps = mlps;
    read_end(*m, p);
    return m;
}

static void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Arwkv7Model&>(model);
    set_time_mix_strides(m, m.mlps[0].down.k, s);
}

EVERSTREAM_FAMILY(
    arwkv7, build, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
