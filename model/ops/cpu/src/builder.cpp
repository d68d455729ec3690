#include "builder.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace everstream {

namespace {

constexpr size_t ALIGNMENT = 64, HUGE_PAGE = size_t(2) << 20, SLAB = 4 * HUGE_PAGE;

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

uint16_t to_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 64);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// A row as int8: the scale, with row[i] ~ scale * out[i * stride...]. NaN where a number is not
// finite, so that the row's products are not either.
float row_scale(const float* row, int64_t n) {
    float largest = 0.0f, finite = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        largest = std::max(largest, std::fabs(row[i]));
        finite += row[i] * 0.0f;
    }
    return largest / 127.0f + finite;
}

int8_t to_int8(float x, float scale) {
    const float q = scale > 0 ? std::nearbyint(x / scale) : 0.0f;
    return int8_t(std::min(127.0f, std::max(-127.0f, q)));
}


}  // namespace

double Options::number(const std::string& name) const {
    const auto found = numbers.find(name);
    if (found == numbers.end()) throw std::invalid_argument("option '" + name + "' is missing");
    return found->second;
}

const std::string& Options::text(const std::string& name) const {
    const auto found = names.find(name);
    if (found == names.end()) throw std::invalid_argument("option '" + name + "' is missing");
    return found->second;
}

void Builder::Free::operator()(void* memory) const { std::free(memory); }

// From slabs of whole huge pages, one after the other: a step reads them front to back.
template <class T>
T* Builder::allocate(size_t count) {
    const size_t bytes = (count * sizeof(T) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes > slab_left_) {
        const size_t slab = (bytes + SLAB - 1) / SLAB * SLAB;
        void* memory = std::aligned_alloc(HUGE_PAGE, slab);
        if (!memory) throw std::bad_alloc();
        slabs_.emplace_back(memory);
#if defined(__linux__)
        madvise(memory, slab, MADV_HUGEPAGE);
#endif
        next_ = static_cast<char*>(memory);
        slab_left_ = slab;
    }
    char* result = next_;
    std::memset(result, 0, bytes);
    next_ += bytes;
    slab_left_ -= bytes;
    num_bytes_ += bytes;
    return reinterpret_cast<T*>(result);
}

Builder::Builder(
    const Options& options, const Weights& weights, const Kernels& kernels, Precision precision)
    : weights_(weights), kernels_(kernels) {
    model_.precision = precision;
    read_options(options);
    const Model& m = model_;
    const Weight embedding = weight("embedding.weight", {m.vocab_size, m.hidden});
    model_.embedding = table(embedding);
    if (m.max_positions)
        model_.positions = table(weight("position_embedding.weight", {m.max_positions, m.hidden}));
    layers_.resize(size_t(m.num_layers));
    for (int i = 0; i < m.num_layers; i++) read_layer(options, i);
    model_.layers = layers_.data();
    model_.norm = norm("norm");
    if (options.integer("tied"))
        model_.head = pack({{embedding, {}}}, precision);
    else
        model_.head = pack({part("head", m.vocab_size, m.hidden, false)}, precision);
}

void Builder::read_options(const Options& o) {
    Model& m = model_;
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

void Builder::read_layer(const Options& o, int index) {
    const Model& m = model_;
    Layer& layer = layers_[size_t(index)];
    layer.state = o.states.at(size_t(index));
    const std::string block = "blocks." + std::to_string(index) + ".", prefix = block + "attention.";
    const bool bias = o.integer("attention_bias") != 0, mlp_bias = m.gelu;
    const int64_t D = m.hidden, HV = int64_t(m.num_heads) * m.value;
    layer.attention_norm = norm(block + "attention_norm");
    layer.mlp_norm = norm(block + "mlp_norm");
    std::vector<Part> in = {part(prefix + "qkv", m.qkv(), D, bias)};
    if (m.gated_output()) in.push_back(part(prefix + "gate", HV, D, false));
    layer.in = pack(in, m.precision);
    layer.out = pack({part(prefix + "out", D, HV, bias)}, m.precision);
    const int64_t up = int64_t(m.intermediate) * (m.gelu ? 1 : 2);
    layer.up = pack({part(block + "mlp.up", up, D, mlp_bias)}, m.precision, !m.gelu);
    layer.down = pack({part(block + "mlp.down", D, m.intermediate, mlp_bias)}, m.precision);
    read_features(prefix, layer);
    read_gates(prefix, layer);
}

// Projections, codebooks and maps from q and k to features.
void Builder::read_features(const std::string& prefix, Layer& layer) {
    const Model& m = model_;
    const int64_t H = m.num_heads, K = m.key, F = m.num_features;
    const auto closeness = [&](const Weight& points, float beta) {  // -beta |w|^2 / 2
        float* bias = allocate<float>(size_t(H * F));
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
            layer.features = transposed(weight(prefix + "projection", {H, F, K}), H, F, K);
            break;
        case Mechanism::performer_simplified: {
            const Weight points = weight(prefix + "projection", {H, F, K});
            layer.features = transposed(points, H, F, K);
            layer.feature_bias = closeness(points, 1.0f);
            break;
        }
        case Mechanism::soft_vq: {
            const Weight points = weight(prefix + "codebook", {H, F, K});
            const Weight prior = weight(prefix + "log_prior", {H, F});
            layer.features = transposed(points, H, F, K);
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
            const Weight points = weight(prefix + "codebook", {H, F, K});
            layer.features = transposed(points, H, F, K);
            layer.feature_bias = closeness(points, 1.0f);
            layer.window_bias = copy(weight(prefix + "bias", {H, m.window}));
            break;
        }
        case Mechanism::dijiang: {
            const Weight by = weight(prefix + "frequency_weight", {H, K});
            std::vector<float> matrix(static_cast<size_t>(H * K * K));
            for (int64_t h = 0; h < H; h++)
                for (int64_t f = 0; f < K; f++)
                    for (int64_t i = 0; i < K; i++) {
                        const double c = std::cos(M_PI / double(K) * (double(i) + 0.5) * double(f));
                        const double scale = std::sqrt(2.0 / double(K)) * (f == 0 ? std::sqrt(0.5) : 1.0);
                        matrix[size_t((h * K + f) * K + i)] = float(c * scale);
                    }
            layer.features = transposed({matrix.data(), {H, K, K}, nullptr}, H, K, K, by.data);
            break;
        }
        case Mechanism::normed:
            if (m.map == FeatureMap::product) {
                const auto read = [&](const std::string& name, const float** w, const float** bias) {
                    const Part both = part(prefix + name + ".both", 2 * K, K, true);
                    *w = transposed(both.weight, 1, 2 * K, K);
                    *bias = copy(both.bias);
                };
                read("q_map", &layer.q_map, &layer.q_map_bias);
                read("k_map", &layer.k_map, &layer.k_map_bias);
            }
            break;
        default: break;
    }
}

// Decays, convolutions and output norms.
void Builder::read_gates(const std::string& prefix, Layer& layer) {
    const Model& m = model_;
    const int64_t H = m.num_heads, K = m.key, D = m.hidden;
    if (m.mechanism >= Mechanism::normed) layer.norm_weight = copy(weight(prefix + "norm_weight", {m.value}));
    if (m.conv_size)
        layer.conv = transposed(weight(prefix + "conv_weight", {m.qkv(), m.conv_size}), 1, m.qkv(), m.conv_size);
    if (m.mechanism == Mechanism::retnet || m.mechanism == Mechanism::dijiang)
        layer.decay = head_decays(m.xpos);
    if (m.mechanism == Mechanism::gated) {
        layer.extra = pack({part(prefix + "decay_down", m.rank, D, false)}, Precision::float32);
        const Part up = part(prefix + "decay_up", H * K, m.rank, true);
        layer.decay_up = transposed(up.weight, H, K, m.rank);
        layer.decay_bias = copy(up.bias);
    }
    if (m.mechanism == Mechanism::delta) {
        std::vector<Part> gates = {part(prefix + "beta", H, D, false)};
        if (m.delta_decay) {
            const Part decay = part(prefix + "decay", H, D, true);
            gates.push_back({decay.weight, {}});
            layer.decay_bias = copy(decay.bias);
            const Weight log = weight(prefix + "decay_log", {H});
            float* rate = allocate<float>(size_t(H));
            for (int64_t h = 0; h < H; h++) rate[h] = float(-std::exp(double(log.data[h])));
            layer.decay_rate = rate;
        }
        layer.extra = pack(gates, Precision::float32);
    }
}

// expm1 of the log decays of RetNet's heads, and of xPos (model/attention/retnet.py), [H][K].
const float* Builder::head_decays(bool xpos) {
    const Model& m = model_;
    float* decay = allocate<float>(size_t(m.num_heads) * size_t(m.key));
    const int half = m.key / 2;
    for (int h = 0; h < m.num_heads; h++)
        for (int f = 0; f < m.key; f++) {
            double log_decay = std::log1p(-std::exp2(-5.0 - h));
            if (xpos) log_decay += std::log((double(f % half) / half + 0.4) / 1.4) / 512.0;
            decay[h * m.key + f] = float(std::expm1(double(float(log_decay))));
        }
    return decay;
}

Weight Builder::weight(const std::string& name, std::vector<int64_t> shape) const {
    Weight w = weights_(name);
    if (w.shape != shape) throw std::invalid_argument("weight '" + name + "' has another shape");
    return w;
}

Builder::Part Builder::part(const std::string& name, int64_t n, int64_t k, bool has_bias) const {
    return {weight(name + ".weight", {n, k}), has_bias ? weight(name + ".bias", {n}) : Weight()};
}

Norm Builder::norm(const std::string& name) {
    const auto vector = [&](const char* part) { return copy(weight(name + part, {model_.hidden})); };
    return {vector(".weight"), model_.layer_norm ? vector(".bias") : nullptr};
}

const float* Builder::copy(const Weight& weight) {
    size_t count = 1;
    for (int64_t n : weight.shape) count *= size_t(n);
    // Room for a whole vector beyond the end.
    float* out = allocate<float>(count + 64);
    std::memcpy(out, weight.data, count * sizeof(float));
    return out;
}

const float* Builder::transposed(
    const Weight& weight, int64_t groups, int64_t rows, int64_t columns, const float* by) {
    float* out = allocate<float>(size_t(groups * rows * columns) + 64);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                out[(g * columns + c) * rows + r] =
                    weight.data[(g * rows + r) * columns + c] * (by ? by[g * rows + r] : 1.0f);
    return out;
}

Table Builder::table(const Weight& weight) {
    const size_t n = size_t(weight.shape[0]), k = size_t(weight.shape[1]);
    Table table;
    table.precision = model_.precision;
    table.n = int(n), table.k = int(k);
    if (table.precision == Precision::float32) {
        table.data = copy(weight);
    } else if (table.precision == Precision::bfloat16) {
        uint16_t* data = allocate<uint16_t>(n * k);
        std::transform(weight.data, weight.data + n * k, data, to_bf16);
        table.data = data;
    } else {
        int8_t* data = allocate<int8_t>(n * k);
        float* scale = allocate<float>(n);
        for (size_t i = 0; i < n; i++) {
            const float* row = weight.data + i * k;
            scale[i] = row_scale(row, int64_t(k));
            for (size_t j = 0; j < k; j++) data[i * k + j] = to_int8(row[j], scale[i]);
        }
        table.data = data, table.scale = scale;
    }
    return table;
}

Matrix Builder::pack(const std::vector<Part>& parts, Precision precision, bool paired) {
    struct Row {
        const float* data = nullptr;
        float bias = 0;
    };
    std::vector<Row> rows;
    bool has_bias = false;
    for (const Part& part : parts)
        for (int64_t i = 0; i < part.weight.shape[0]; i++) {
            rows.push_back({part.weight.data + i * part.weight.shape[1], part.bias.data ? part.bias.data[i] : 0});
            has_bias = has_bias || part.bias.data;
        }
    const int panel = kernels_.panel, half = panel / 2;
    if (paired) {  // each panel: half a panel of gates, and their values
        const int num = int(rows.size()) / 2;
        std::vector<Row> mixed;
        for (int begin = 0; begin < num; begin += half)
            for (int side = 0; side < 2; side++)
                for (int i = begin; i < begin + half; i++)
                    mixed.push_back(i < num ? rows[size_t(side * num + i)] : Row());
        rows = mixed;
    }
    Matrix w;
    w.precision = precision;
    w.panel = panel;
    w.part = kernels_.part;
    w.n = int(rows.size());
    w.k = int(parts[0].weight.shape[1]);
    w.k_padded = (w.k + 3) / 4 * 4;
    const size_t padded_n = size_t(w.num_panels()) * size_t(panel);
    char* data = allocate<char>(size_t(w.num_panels()) * w.panel_bytes());
    float* scale = precision == Precision::int8 ? allocate<float>(padded_n) : nullptr;
    int32_t* sums = precision == Precision::int8 ? allocate<int32_t>(padded_n) : nullptr;
    float* bias = has_bias ? allocate<float>(padded_n) : nullptr;
    for (int r = 0; r < w.n; r++) {
        const Row& row = rows[size_t(r)];
        if (!row.data) continue;
        char* to = data + size_t(r / w.part) * (w.panel_bytes() / size_t(panel / w.part));
        const size_t c = size_t(r % w.part), P = size_t(w.part);
        if (bias) bias[r] = row.bias;
        if (precision == Precision::float32) {
            for (size_t i = 0; i < size_t(w.k); i++) ((float*)to)[i * P + c] = row.data[i];
        } else if (precision == Precision::bfloat16) {
            for (size_t i = 0; i < size_t(w.k); i++)
                ((uint16_t*)to)[(i / 2 * P + c) * 2 + i % 2] = to_bf16(row.data[i]);
        } else {
            scale[r] = row_scale(row.data, w.k);
            for (size_t i = 0; i < size_t(w.k); i++) {
                const int8_t q = to_int8(row.data[i], scale[r]);
                ((int8_t*)to)[(i / 4 * P + c) * 4 + i % 4] = q;
                sums[r] += 128 * q;
            }
        }
    }
    w.data = data, w.scale = scale, w.sums = sums, w.bias = bias;
    return w;
}

}  // namespace everstream
