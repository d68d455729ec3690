// Jamba models; the names of weights are those of model/families/jamba.
#include "families/bounded/builder.h"
#include "families/jamba/model.h"
#include "families/mamba/mamba1_builder.h"

namespace everstream {

namespace {

std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<JambaModel>();
    read_beginning(*m, o, p, precision);
    read_bounded(*m, o, p, false);
    m->mamba = read_mamba1_sizes(o);
    auto* layers = p.arena.make<BoundedLayer>(m->num_layers);
    auto* mixers = p.arena.make<Mamba1Mixer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) {
        read_bounded_layer(*m, o, p, i, layers[i], [&](const std::string& mixer) {
            mixers[i] = read_mamba1_mixer(m->mamba, o, p, precision, i, mixer);
        });
    }
    m->layers = layers;
    m->mamba.layers = mixers;
    read_end(*m, p);
    return m;
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const JambaModel&>(model);
    static_assert(JambaBuffers::num <= MAX_BUFFERS);
    set_mamba1_strides<JambaBuffers>(m.mamba, s);
    set_bounded_strides(m, s, m.layers[0].mlp.down.k);
}

}  // namespace

EVERSTREAM_FAMILY(
    jamba, build, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
