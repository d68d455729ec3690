// Models of our own block.
#include <cmath>
#include <map>
#include <new>
#include <stdexcept>

#include "block_model.h"
#include "builder.h"

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
    void read_features(const std::string& prefix, Layer& layer);
    void read_gates(const std::string& prefix, Layer& layer);
    Norm norm(const std::string& name);
    const float* head_decays(bool xpos);

    Packer& p_;
    BlockModel model_;
    Layer* layers_ = nullptr;
};

StateOffsets offsets(const Options& options, int layer) {
    StateOffsets o;
    const std::map<std::string, size_t*> known = {
        {"S", &o.S}, {"z", &o.z}, {"max", &o.max}, {"conv", &o.conv}, {"k", &o.k}, {"v", &o.v},
        {"code", &o.code}, {"count", &o.count}, {"sum", &o.sum}, {"S_before", &o.S_before},
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
    model_.family = Family::block;
    model_.precision = precision;
    read_options(options);
    const BlockModel& m = model_;
    model_.embedding = p_.table("embedding.weight", m.vocab_size, m.hidden, precision);
    if (m.max_positions)
        model_.positions =
            p_.table("position_embedding.weight", m.max_positions, m.hidden, precision);
    layers_ = new (p_.arena.allocate<Layer>(size_t(m.num_layers))) Layer[size_t(m.num_layers)];
    model_.layers = layers_;
    for (int i = 0; i < m.num_layers; i++) read_layer(options, i);
    model_.norm = norm("norm");
    const char* head = options.integer("tied") ? "embedding" : "head";
    model_.head = p_.pack({{head, m.vocab_size, m.hidden, false}}, precision);
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
    m.vocab_size = o.integer("vocab_size");
    m.hidden = o.integer("hidden_size");
    m.num_layers = o.integer("num_layers");
    m.num_heads = o.integer("num_heads");
    m.key = o.integer("key_dim");
    m.value = o.integer("head_dim");
    m.num_features = o.integer("num_features");
    m.intermediate = o.integer("intermediate_size");
    m.window = o.integer("window");
    m.conv_size = o.integer("conv_size");
    m.rank = o.integer("decay_rank");
    m.epoch = int64_t(o.number("epoch"));
    m.beta = float(o.number("beta"));
    m.eps = float(o.number("eps"));
    m.rope_theta = o.number("rope_theta");
    m.layer_norm = o.integer("layer_norm") != 0;
    m.gelu = o.integer("gelu") != 0;
    m.delta_decay = o.integer("delta_decay") != 0;
    m.xpos = o.integer("xpos") != 0;
    m.max_positions = o.integer("max_positions");
    m.state_bytes = size_t(o.number("state_bytes"));
}

void BlockBuilder::read_layer(const Options& o, int index) {
    const BlockModel& m = model_;
    Layer& layer = layers_[index];
    layer.state = offsets(o, index);
    const std::string block = "blocks." + std::to_string(index) + ".", prefix = block + "attention.";
    const bool bias = o.integer("attention_bias") != 0, mlp_bias = m.gelu;
    const int64_t D = m.hidden, HV = int64_t(m.num_heads) * m.value;
    layer.attention_norm = norm(block + "attention_norm");
    layer.mlp_norm = norm(block + "mlp_norm");
    std::vector<Part> in = {{prefix + "qkv", m.qkv(), D, bias}};
    if (m.gated_output()) in.push_back({prefix + "gate", HV, D, false});
    layer.in = p_.pack(in, m.precision);
    layer.out = p_.pack({{prefix + "out", D, HV, bias}}, m.precision);
    const int64_t up = int64_t(m.intermediate) * (m.gelu ? 1 : 2);
    layer.up = p_.pack({{block + "mlp.up", up, D, mlp_bias}}, m.precision, !m.gelu);
    layer.down = p_.pack({{block + "mlp.down", D, m.intermediate, mlp_bias}}, m.precision);
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
            layer.features = p_.transposed(p_.weight(prefix + "projection", {H, F, K}), H, F, K);
            break;
        case Mechanism::performer_simplified: {
            const Weight points = p_.weight(prefix + "projection", {H, F, K});
            layer.features = p_.transposed(points, H, F, K);
            layer.feature_bias = closeness(points, 1.0f);
            break;
        }
        case Mechanism::soft_vq: {
            const Weight points = p_.weight(prefix + "codebook", {H, F, K});
            const Weight prior = p_.weight(prefix + "log_prior", {H, F});
            layer.features = p_.transposed(points, H, F, K);
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
            const Weight points = p_.weight(prefix + "codebook", {H, F, K});
            layer.features = p_.transposed(points, H, F, K);
            layer.feature_bias = closeness(points, 1.0f);
            layer.window_bias = p_.copy(p_.weight(prefix + "bias", {H, m.window}));
            break;
        }
        case Mechanism::dijiang: {
            const Weight by = p_.weight(prefix + "frequency_weight", {H, K});
            std::vector<float> matrix(static_cast<size_t>(H * K * K));
            for (int64_t h = 0; h < H; h++)
                for (int64_t f = 0; f < K; f++)
                    for (int64_t i = 0; i < K; i++) {
                        const double c = std::cos(M_PI / double(K) * (double(i) + 0.5) * double(f));
                        const double scale = std::sqrt(2.0 / double(K)) * (f == 0 ? std::sqrt(0.5) : 1.0);
                        matrix[size_t((h * K + f) * K + i)] = float(c * scale);
                    }
            layer.features = p_.transposed({matrix.data(), {H, K, K}, nullptr}, H, K, K, by.data);
            break;
        }
        case Mechanism::normed:
            if (m.map == FeatureMap::product) {
                const auto read = [&](const std::string& name, const float** w, const float** bias) {
                    const std::string both = prefix + name + ".both";
                    *w = p_.transposed(p_.weight(both + ".weight", {2 * K, K}), 1, 2 * K, K);
                    *bias = p_.copy(p_.weight(both + ".bias", {2 * K}));
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
    const int64_t H = m.num_heads, K = m.key, D = m.hidden;
    if (m.mechanism >= Mechanism::normed) layer.norm_weight = p_.copy(p_.weight(prefix + "norm_weight", {m.value}));
    if (m.conv_size)
        layer.conv = p_.transposed(p_.weight(prefix + "conv_weight", {m.qkv(), m.conv_size}), 1, m.qkv(), m.conv_size);
    if (m.mechanism == Mechanism::retnet || m.mechanism == Mechanism::dijiang)
        layer.decay = head_decays(m.xpos);
    if (m.mechanism == Mechanism::gated) {
        layer.extra = p_.pack({{prefix + "decay_down", m.rank, D, false}}, Precision::float32);
        const std::string up = prefix + "decay_up";
        layer.decay_up = p_.transposed(p_.weight(up + ".weight", {H * K, m.rank}), H, K, m.rank);
        layer.decay_bias = p_.copy(p_.weight(up + ".bias", {H * K}));
    }
    if (m.mechanism == Mechanism::delta) {
        std::vector<Part> gates = {{prefix + "beta", H, D, false}};
        if (m.delta_decay) {
            gates.push_back({prefix + "decay", H, D, false});
            layer.decay_bias = p_.copy(p_.weight(prefix + "decay.bias", {H}));
            const Weight log = p_.weight(prefix + "decay_log", {H});
            float* rate = p_.arena.allocate<float>(size_t(H));
            for (int64_t h = 0; h < H; h++) rate[h] = float(-std::exp(double(log.data[h])));
            layer.decay_rate = rate;
        }
        layer.extra = p_.pack(gates, Precision::float32);
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

Norm BlockBuilder::norm(const std::string& name) {
    const auto vector = [&](const char* part) {
        return p_.copy(p_.weight(name + part, {model_.hidden}));
    };
    return {vector(".weight"), model_.layer_norm ? vector(".bias") : nullptr};
}

}  // namespace

std::shared_ptr<const Model> build_block(const Options& options, Packer& packer, Precision precision) {
    return std::make_shared<BlockModel>(BlockBuilder(options, packer, precision).model());
}

}  // namespace everstream
