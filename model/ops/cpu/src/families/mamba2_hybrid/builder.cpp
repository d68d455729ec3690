// Hybrids over Mamba-2; the names of weights are those of model/families/mamba2_hybrid.
#include <algorithm>

#include "families/bounded/builder.h"
#include "families/mamba/mamba2_builder.h"
#include "families/mamba2_hybrid/model.h"

namespace everstream {

namespace {

// `part` is in front of the names of one of two mixers.
std::string mixer_name(const Packer& p, const std::string& mixer, const std::string& part) {
    return p.has(mixer + part + "out.weight") ? mixer + part : mixer;
}

Mamba2HybridLayer read_layer(const Mamba2HybridModel& m, const Options& o, Packer& p, int index) {
    const std::string block = "blocks." + std::to_string(index) + ".", mixer = block + "mixer.";
    const std::string attention = mixer_name(p, mixer, "attention.");
    Mamba2HybridLayer l;
    l.norm = p.norm(block + "mixer_norm");
    l.is_attention = is_attention(p, attention);
    l.is_mamba = p.has(mixer_name(p, mixer, "mamba.") + "in.weight");
    if (l.is_attention) l.attention = read_attention(m, o, p, index, attention);
    if (m.ends_with_mlp)
        l.mlp = read_mlp(p, block, m.precision);
    else if (!l.is_attention && !l.is_mamba)
        l.mlp = {{}, p.pack({mixer + "up"}, m.precision), p.pack({mixer + "down"}, m.precision)};
    return l;
}

std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<Mamba2HybridModel>();
    read_beginning(*m, o, p, precision);
    read_bounded(*m, o, p, false);
    m->embedding_scale = float(o.number("embedding_scale"));
    m->residual_scale = float(o.number("residual_scale"));
    if (const double scale = o.number("attention_scale")) m->score_scale = float(scale);
    m->intermediate = o.integer("intermediate_size");
    m->ends_with_mlp = o.number("ends_with_mlp") != 0;
    m->mamba = read_mamba2_sizes(o, o.integer("num_mamba_heads"), o.integer("mamba_head_dim"));
    auto* layers = p.arena.make<Mamba2HybridLayer>(m->num_layers);
    auto* mixers = p.arena.make<Mamba2Mixer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) {
        layers[i] = read_layer(*m, o, p, i);
        if (!layers[i].is_mamba) continue;
        const std::string mixer = "blocks." + std::to_string(i) + ".mixer.";
        mixers[i] =
            read_mamba2_mixer(m->mamba, o, p, precision, i, mixer_name(p, mixer, "mamba."));
    }
    m->layers = layers;
    m->mamba.layers = mixers;
    read_end(*m, p);
    return m;
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Mamba2HybridModel&>(model);
    using B = Mamba2HybridBuffers;
    static_assert(B::num <= MAX_BUFFERS);
    set_buffer(s, B::projected, padded_stride(m.mamba.rows_of_in()));
    set_buffer(s, B::y, padded_stride(m.mamba.inner));
    s.widest = s.buffers[B::y];
    set_bounded_strides(m, s, m.intermediate);
}

}  // namespace

EVERSTREAM_FAMILY(
    mamba2_hybrid, build, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
