// Llama models; the names of weights are those of model/architectures/llama.
#include "bounded_builder.h"
#include "llama_model.h"

namespace everstream {

namespace {

LlamaLayer read_layer(const LlamaModel& m, const Options& o, Packer& p, int index) {
    const std::string block = "blocks." + std::to_string(index) + ".", mixer = block + "mixer.";
    LlamaLayer l;
    l.norm = p.norm(block + "mixer_norm");
    l.attention = read_attention(m, o, p, index, mixer);
    l.attention.rotates = o.integer("rotates_" + std::to_string(index)) != 0;
    l.mlp = read_mlp(p, block, m.precision);
    return l;
}

std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<LlamaModel>();
    read_beginning(*m, o, p, precision);
    read_bounded(*m, o, p, false);
    auto* layers = p.arena.make<LlamaLayer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) layers[i] = read_layer(*m, o, p, i);
    m->layers = layers;
    read_end(*m, p);
    return m;
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const LlamaModel&>(model);
    static_assert(BoundedBuffers::num <= MAX_BUFFERS);
    set_bounded_strides(m, s, m.layers[0].mlp.down.k);
}

}  // namespace

EVERSTREAM_FAMILY(
    llama, build, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
