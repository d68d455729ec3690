// Llama models; the names of weights are those of model/families/llama.
#include <algorithm>
#include <cmath>

#include "families/bounded/builder.h"
#include "families/llama/model.h"

namespace everstream {

namespace {

// A far part's small weights in the order in which the kernels read them.
FarPart read_far(
    const LlamaModel& m, const Options& o, Packer& p, int index, const std::string& name, int window) {
    FarPart far;
    far.kind = FarPart::Kind(o.integer("far_" + std::to_string(index)));
    if (far.kind == FarPart::none) return far;
    const int F = m.head_size, half = F / 2;
    const float root = 1.0f / std::sqrt(float(F));
    far.features = o.integer("features_" + std::to_string(index));
    far.key_map = p.vector(name + "key_map");
    far.query_map = p.vector(name + "query_map");
    float* scale = p.arena.allocate<float>(size_t(m.num_heads) * F);
    const Weight from = p.weight(name + "scale");
    for (int i = 0; i < m.num_heads * F; i++) scale[i] = from.data[i] * root;
    far.scale = scale;
    far.bias = p.vector(name + "bias");
    float* back = p.arena.allocate<float>(size_t(F));
    for (int i = 0; i < half; i++) {
        const double angle = window * m.frequencies[i];
        back[i] = float(std::cos(angle)), back[i + half] = float(std::sin(angle));
    }
    far.back = back, far.back_sine = back + half;
    far.S = o.state(index, "S");
    if (far.kind == FarPart::relative) {
        far.z = o.state(index, "z");
        return far;
    }
    const Weight gates = p.weight(name + "gates");  // [G][2 F][2]
    float* turned = p.arena.allocate<float>(size_t(m.num_kv_heads) * 4 * F);
    for (int i = 0; i < m.num_kv_heads * 2 * F; i++)
        for (int j = 0; j < 2; j++)
            turned[(i / (2 * F) * 2 + j) * 2 * F + i % (2 * F)] = gates.data[2 * i + j] * root;
    far.gates = turned;
    far.gate_bias = p.vector(name + "gate_bias");
    return far;
}

// What a layer of constant state keeps: a window, and what the far part sums.
void read_window(LlamaModel& m, const Options& o, Packer& p, int index, const std::string& mixer, BoundedAttention& l) {
    make_window(m, l, o.integer("context_" + std::to_string(index)));
    l.far = read_far(m, o, p, index, mixer + "far.", l.context - m.sinks);
    m.features = std::max(m.features, l.far.features);
}

void read_layer(LlamaModel& m, const Options& o, Packer& p, int index, BoundedLayer& l) {
    const std::string mixer = read_bounded_layer(m, o, p, index, l);
    l.attention.rotates = o.integer("rotates_" + std::to_string(index)) != 0;
    if (o.number("windowed") != 0) read_window(m, o, p, index, mixer, l.attention);
}

std::shared_ptr<const Model> build(const Options& o, Packer& p, Precision precision) {
    auto m = std::make_shared<LlamaModel>();
    read_beginning(*m, o, p, precision);
    read_bounded(*m, o, p, false);
    auto* layers = p.arena.make<BoundedLayer>(m->num_layers);
    for (int i = 0; i < m->num_layers; i++) read_layer(*m, o, p, i, layers[i]);
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
