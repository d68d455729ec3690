// Hybrids over Mamba-2; the names of weights are those of model/families/mamba2_hybrid.
#include "families/bounded/builder.h"
#include "families/mamba/mamba2_builder.h"
#include "families/mamba2_hybrid/model.h"

namespace everstream {

namespace {

// What is not attention alone: Mamba-2, both, with a part in front of the names of each, or an MLP.
void read_mixers(
    const Mamba2HybridModel& m, const Options& o, Packer& p, int index, BoundedLayer& l,
    Mamba2Mixer& mamba, std::string mixer) {
    if (p.has(mixer + "attention.q.weight")) {
        l.is_attention = true;
        l.attention = read_attention(m, o, p, index, mixer + "attention.");
        mixer += "mamba.";
    }
    if (p.has(mixer + "in.weight"))
        mamba = read_mamba2_mixer(m.mamba, o, p, m.precision, index, mixer);
    else if (!l.is_attention)
        l.mlp = {{}, p.pack({mixer + "up"}, m.precision), p.pack({mixer + "down"}, m.precision)};
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
    auto* layers = p.arena.make<BoundedLayer>(m->num_layers);
    auto* mixers = p.arena.make<Mamba2Mixer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++)
        read_bounded_layer(*m, o, p, i, layers[i], [&](const std::string& mixer) {
            read_mixers(*m, o, p, i, layers[i], mixers[i], mixer);
        });
    m->layers = layers;
    m->mamba.layers = mixers;
    read_end(*m, p);
    return m;
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const Mamba2HybridModel&>(model);
    static_assert(Mamba2HybridBuffers::num <= MAX_BUFFERS);
    set_mamba2_strides<Mamba2HybridBuffers>(m.mamba, s);
    set_bounded_strides(m, s, m.intermediate);
}

}  // namespace

EVERSTREAM_FAMILY(
    mamba2_hybrid, build, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
