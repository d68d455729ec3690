// Models of our own block.
#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

#include "families/block/model.h"
#include "runtime/family.h"

namespace everstream {

namespace {

const std::map<std::string, Mechanism> MECHANISMS = {
    {"elu", Mechanism::elu},
    {"relu", Mechanism::relu},
    {"softmax_map", Mechanism::softmax_map},
    {"cosine", Mechanism::cosine},
    {"performer", Mechanism::performer},
    {"performer_simplified", Mechanism::performer_simplified},
    {"rbf", Mechanism::rbf},
    {"soft_vq", Mechanism::soft_vq},
    {"efficient", Mechanism::efficient},
    {"window_linear", Mechanism::window_linear},
    {"vq", Mechanism::vq},
    {"cosformer", Mechanism::cosformer},
    {"normed", Mechanism::normed},
    {"retnet", Mechanism::retnet},
    {"dijiang", Mechanism::dijiang},
    {"gated", Mechanism::gated},
    {"delta", Mechanism::delta},
};

template <class T>
T choose(const std::map<std::string, T>& table, const std::string& name) {
    const auto found = table.find(name);
    if (found == table.end()) throw std::invalid_argument("no native form of '" + name + "'");
    return found->second;
}

class BlockBuilder {
public:
    BlockBuilder(const Options& options, Packer& packer, Precision precision);
    const BlockModel& model() const { return model_; }

private:
    void read_options(const Options& options);
    void read_layer(const Options& options, int index);
    void list_pieces(const Options& options, int index);
    void read_features(const std::string& prefix, Layer& layer);
    void read_gates(const std::string& prefix, Layer& layer);
    const float* head_decays(bool xpos);

    Packer& p_;
    BlockModel model_;
    Layer* layers_ = nullptr;
};

StateOffsets offsets(const Options& options, int layer) {
    StateOffsets o;
    const std::map<std::string, size_t*> known = {
        {"S", &o.S}, {"z", &o.z}, {"max", &o.max}, {"conv", &o.conv}, {"k", &o.k}, {"v", &o.v},
        {"code", &o.code}, {"count", &o.count}, {"sum", &o.S}, {"S_before", &o.S_before},
        {"z_before", &o.z_before}};
    for (const auto& [name, offset] : options.states.at(size_t(layer))) {
        const auto found = known.find(name);
        if (found == known.end()) throw std::invalid_argument("no native form of state '" + name + "'");
        *found->second = offset;
    }
    return o;
}

BlockBuilder::BlockBuilder(const Options& options, Packer& packer, Precision precision)
    : p_(packer) {
    read_beginning(model_, options, p_, precision);
    read_options(options);
    const BlockModel& m = model_;
    if (p_.has("position_embedding.weight"))
        model_.positions = p_.table("position_embedding.weight", precision);
    model_.layers = layers_ = p_.arena.make<Layer>(m.num_layers);
    for (int i = 0; i < m.num_layers; i++) read_layer(options, i);
    model_.intermediate = layers_[0].down.k;
    read_end(model_, p_);
}

void BlockBuilder::read_options(const Options& o) {
    BlockModel& m = model_;
    m.mechanism = choose(MECHANISMS, o.text("mechanism"));
    m.rotary = choose<Rotary>(
        {{"none", Rotary::none}, {"before", Rotary::before}, {"after", Rotary::after}}, o.text("rotary"));
    m.map = choose<FeatureMap>(
        {{"product", FeatureMap::product}, {"elu", FeatureMap::elu}, {"relu", FeatureMap::relu},
         {"identity", FeatureMap::identity}},
        o.text("map"));
    m.num_heads = o.integer("num_heads");
    m.key = o.integer("key_dim");
    m.value = o.integer("head_dim");
    m.num_features = o.integer("num_features");
    m.window = o.integer("window");
    m.conv_size = o.integer("conv_size");
    m.rank = o.integer("decay_rank");
    m.epoch = int64_t(o.number("epoch"));
    m.beta = float(o.number("beta"));
    m.max_beta = float(o.number("max_beta"));
    m.frequencies = rope_frequencies(p_, o.number("rope_theta"), m.key / 2);
    m.gelu = o.integer("gelu") != 0;
    m.xpos = o.integer("xpos") != 0;
    const bool decays = m.mechanism == Mechanism::gated || m.mechanism == Mechanism::delta ||
                        m.mechanism == Mechanism::retnet || m.mechanism == Mechanism::dijiang;
    m.single = decays || m.mechanism == Mechanism::cosformer;
    if (decays) m.head_bytes = m.sum_bytes(size_t(m.sum_count()));
}

// What each head has of the state. Sums have `num_features` rows.
void BlockBuilder::list_pieces(const Options& o, int index) {
    const BlockModel& m = model_;
    const auto H = size_t(m.num_heads), K = size_t(m.key), V = size_t(m.value);
    const auto F = size_t(m.num_features), width = size_t(m.qkv()) * sizeof(float);
    const size_t number = m.sum_number(), bytes = m.sum_bytes(F * V, number);
    const std::map<std::string, size_t> sums = {
        {"S", bytes}, {"S_before", bytes}, {"sum", bytes},
        {"z", F * number}, {"z_before", F * number}, {"max", F * sizeof(float)},
        {"count", F * sizeof(int64_t)}};
    const std::map<std::string, size_t> windows = {
        {"k", K * sizeof(float)}, {"v", V * sizeof(float)}, {"code", sizeof(int64_t)}};
    std::vector<StatePiece> pieces;
    for (const auto& [name, offset] : o.states.at(size_t(index))) {
        if (const auto sum = sums.find(name); sum != sums.end()) {
            pieces.push_back({offset, sum->second});
        } else if (const auto window = windows.find(name); window != windows.end()) {
            pieces.push_back({offset, window->second, m.window, H * window->second});
        } else {  // the convolution's: of queries, keys and values
            const size_t k = K * sizeof(float), v = V * sizeof(float);
            pieces.push_back({offset, k, m.conv_size - 1, width});
            pieces.push_back({offset + H * k, k, m.conv_size - 1, width});
            pieces.push_back({offset + 2 * H * k, v, m.conv_size - 1, width});
        }
    }
    auto* kept = p_.arena.make<StatePiece>(int(pieces.size()));
    std::copy(pieces.begin(), pieces.end(), kept);
    layers_[index].pieces = kept;
    layers_[index].num_pieces = int(pieces.size());
}

void BlockBuilder::read_layer(const Options& o, int index) {
    const BlockModel& m = model_;
    Layer& layer = layers_[index];
    layer.state = offsets(o, index);
    list_pieces(o, index);
    const std::string block = "blocks." + std::to_string(index) + ".", prefix = block + "attention.";
    layer.attention_norm = p_.norm(block + "attention_norm");
    layer.mlp_norm = p_.norm(block + "mlp_norm");
    std::vector<std::string> in = {prefix + "qkv"};
    model_.gated = p_.has(prefix + "gate.weight");
    if (m.gated) in.push_back(prefix + "gate");
    layer.in = p_.pack(in, m.precision);
    layer.out = p_.pack({prefix + "out"}, m.precision);
    layer.up = p_.pack({block + "mlp.up"}, m.precision, m.gelu ? Rows::plain : Rows::paired);
    layer.down = p_.pack({block + "mlp.down"}, m.precision);
    read_features(prefix, layer);
    read_gates(prefix, layer);
}

// Projections, codebooks and maps from q and k to features.
void BlockBuilder::read_features(const std::string& prefix, Layer& layer) {
    const BlockModel& m = model_;
    const int64_t H = m.num_heads, K = m.key, F = m.num_features;
    const auto closeness = [&](const Weight& points, float beta) {  // -beta |w|^2 / 2
        float* bias = p_.arena.allocate<float>(size_t(H * F));
        for (int64_t i = 0; i < H * F; i++) {
            double square = 0;
            for (int64_t j = 0; j < K; j++) square += double(points.data[i * K + j]) * points.data[i * K + j];
            bias[i] = float(-0.5 * beta * square);
        }
        return bias;
    };
    switch (m.mechanism) {
        case Mechanism::performer:
        case Mechanism::rbf:
        case Mechanism::window_linear:
            layer.features = p_.transposed(p_.weight(prefix + "projection"), H);
            break;
        case Mechanism::performer_simplified: {
            const Weight points = p_.weight(prefix + "projection");
            layer.features = p_.transposed(points, H);
            layer.feature_bias = closeness(points, 1.0f);
            break;
        }
        case Mechanism::soft_vq: {
            const Weight points = p_.weight(prefix + "codebook");
            const Weight prior = p_.weight(prefix + "log_prior");
            layer.features = p_.transposed(points, H);
            float* bias = closeness(points, m.beta);
            for (int64_t h = 0; h < H; h++) {
                double total = 0;
                for (int64_t f = 0; f < F; f++) total += std::exp(double(prior.data[h * F + f]));
                for (int64_t f = 0; f < F; f++)
                    bias[h * F + f] += float(double(prior.data[h * F + f]) - std::log(total));
            }
            layer.feature_bias = bias;
            break;
        }
        case Mechanism::vq: {
            const Weight points = p_.weight(prefix + "codebook");
            layer.features = p_.transposed(points, H);
            layer.feature_bias = closeness(points, 1.0f);
            layer.window_bias = p_.vector(prefix + "bias");
            break;
        }
        case Mechanism::dijiang: {
            const Weight by = p_.weight(prefix + "frequency_weight");
            std::vector<float> matrix(static_cast<size_t>(H * K * K));
            for (int64_t h = 0; h < H; h++)
                for (int64_t f = 0; f < K; f++)
                    for (int64_t i = 0; i < K; i++) {
                        const double c = std::cos(M_PI / double(K) * (double(i) + 0.5) * double(f));
                        const double scale = std::sqrt(2.0 / double(K)) * (f == 0 ? std::sqrt(0.5) : 1.0);
                        matrix[size_t((h * K + f) * K + i)] = float(c * scale);
                    }
            layer.features = p_.transposed({matrix.data(), {H, K, K}, nullptr}, H, by.data);
            break;
        }
        case Mechanism::normed:
            if (m.map == FeatureMap::product) {
                const auto read = [&](const std::string& name, const float** w, const float** bias) {
                    const std::string both = prefix + name + ".both";
                    *w = p_.transposed(p_.weight(both + ".weight"), 1);
                    *bias = p_.vector(both + ".bias");
                };
                read("q_map", &layer.q_map, &layer.q_map_bias);
                read("k_map", &layer.k_map, &layer.k_map_bias);
            }
            break;
        default: break;
    }
}

// Decays, convolutions and output norms.
void BlockBuilder::read_gates(const std::string& prefix, Layer& layer) {
    const BlockModel& m = model_;
    const int64_t H = m.num_heads;
    if (p_.has(prefix + "norm_weight")) layer.norm_weight = p_.vector(prefix + "norm_weight");
    if (p_.has(prefix + "conv_weight"))
        layer.conv = p_.transposed(p_.weight(prefix + "conv_weight"), 1);
    if (m.mechanism == Mechanism::retnet || m.mechanism == Mechanism::dijiang)
        layer.decay = head_decays(m.xpos);
    if (m.mechanism == Mechanism::gated) {
        layer.extra = p_.pack({prefix + "decay_down"}, Precision::float32);
        layer.decay_up = p_.transposed(p_.weight(prefix + "decay_up.weight"), H);
        layer.decay_bias = p_.vector(prefix + "decay_up.bias");
    }
    if (m.mechanism == Mechanism::delta) {
        std::vector<std::string> gates = {prefix + "beta"};
        if (p_.has(prefix + "decay_log")) {
            gates.push_back(prefix + "decay");
            layer.decay_bias = p_.vector(prefix + "decay.bias");
            const Weight log = p_.weight(prefix + "decay_log");
            float* rate = p_.arena.allocate<float>(size_t(H));
            for (int64_t h = 0; h < H; h++) rate[h] = float(-std::exp(double(log.data[h])));
            layer.decay_rate = rate;
        }
        layer.extra = p_.pack(gates, Precision::float32, Rows::plain, Bias::left_out);
    }
}

// expm1 of the log decays of RetNet's heads, and of xPos (model/attention/retnet.py), [H][K].
const float* BlockBuilder::head_decays(bool xpos) {
    const BlockModel& m = model_;
    float* decay = p_.arena.allocate<float>(size_t(m.num_heads) * size_t(m.key));
    const int half = m.key / 2;
    for (int h = 0; h < m.num_heads; h++)
        for (int f = 0; f < m.key; f++) {
            double log_decay = std::log1p(-std::exp2(-5.0 - h));
            if (xpos) log_decay += std::log((double(f % half) / half + 0.4) / 1.4) / 512.0;
            decay[h * m.key + f] = float(std::expm1(double(float(log_decay))));
        }
    return decay;
}

std::shared_ptr<const Model> build_block(const Options& options, Packer& packer, Precision precision) {
    return std::make_shared<BlockModel>(BlockBuilder(options, packer, precision).model());
}

void set_strides(const Model& model, Strides& s) {
    const auto& m = static_cast<const BlockModel&>(model);
    using B = BlockBuffers;
    static_assert(B::num <= MAX_BUFFERS);
    set_buffer(s, B::in, padded_stride(m.layers[0].in.n));
    set_buffer(s, B::extra, padded_stride(m.layers[0].extra.n));
    set_buffer(s, B::attended, padded_stride(m.num_heads * m.value));
    set_buffer(s, B::hidden, padded_stride(m.intermediate));
    set_buffer(s, B::cos, m.key);
    set_buffer(s, B::sin, m.key);
    s.widest = std::max({s.x, s.buffers[B::attended], s.buffers[B::hidden]});
    s.prepared = s.widest;
}

}  // namespace

EVERSTREAM_FAMILY(
    block, build_block, set_strides, Precision::float32, Precision::bfloat16, Precision::int8,
    Precision::int4)

}  // namespace everstream
