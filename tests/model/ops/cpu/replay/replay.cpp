// Runs a model without Python: reads its options, weights and tokens from the file that
// recording.py writes, and writes the logits after the last token and the state.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>

#include "levels.h"
#include "runtime.h"

using namespace everstream;

namespace {

struct Recording {
    Options options;
    std::map<std::string, Weight> weights;
    std::vector<int32_t> tokens;
};

Weight read_weight(std::istream& in) {
    Weight weight;
    size_t ndim, count = 1;
    in >> ndim;
    weight.shape.resize(ndim);
    for (int64_t& n : weight.shape) {
        in >> n;
        count *= size_t(n);
    }
    in.ignore(1);
    auto data = std::make_shared<std::vector<float>>(count);
    in.read(reinterpret_cast<char*>(data->data()), std::streamsize(count * sizeof(float)));
    weight.data = data->data();
    weight.keep = data;
    return weight;
}

void read_offset(std::istream& in, Options& options) {
    size_t layer, offset;
    std::string name;
    in >> layer >> name >> offset;
    if (options.states.size() <= layer) options.states.resize(layer + 1);
    options.states[layer][name] = offset;
}

Weights weights_of(const Recording& r) {
    Weights weights;
    weights.has = [&r](const std::string& name) { return r.weights.count(name) > 0; };
    weights.shape = [&r](const std::string& name) { return r.weights.at(name).shape; };
    weights.rows = [&r](const std::string& name, int64_t begin, int64_t end) {
        Weight weight = r.weights.at(name);
        weight.shape[0] = end - begin;
        for (size_t i = 1; i < weight.shape.size(); i++) begin *= weight.shape[i];
        weight.data += begin;
        return weight;
    };
    weights.held_as = [](const std::string& name) {
        const bool is_table = name == "embedding.weight" || name == "head.weight" ||
                              name == "position_embedding.weight";
        return is_table ? Precision::int8 : Precision::int4;
    };
    return weights;
}

Recording read(const char* path) {
    Recording r;
    std::ifstream in(path, std::ios::binary);
    std::string kind, name;
    while (in >> kind) {
        if (kind == "number") in >> name >> r.options.numbers[name];
        else if (kind == "name") in >> name >> r.options.names[name];
        else if (kind == "offset") read_offset(in, r.options);
        else if (kind == "weight") in >> name, r.weights[name] = read_weight(in);
        else if (kind == "token") in >> r.tokens.emplace_back();
        else throw std::invalid_argument(kind);
    }
    return r;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) return 2;
    const Recording r = read(argv[1]);
    const std::map<std::string, Precision> precisions = {
        {"float32", Precision::float32}, {"bfloat16", Precision::bfloat16},
        {"int8", Precision::int8}, {"int4", Precision::int4}};
    const auto vocab_size = int(r.weights.at("embedding.weight").shape[0]);
    Runtime runtime(r.options, weights_of(r), argv[3], precisions.at(argv[2]), 2, vocab_size);
    std::vector<char> state(runtime.model().state_bytes);
    Draw draw;
    draw.temperature = 0.0f;
    Feed feed;
    feed.state = state.data();
    feed.tokens = r.tokens.data();
    feed.num_tokens = int(r.tokens.size());
    feed.draw = &draw;
    feed.num_draws = 1;
    runtime.run({feed});
    std::fwrite(runtime.logits(0), sizeof(float), size_t(vocab_size), stdout);
    std::fwrite(state.data(), 1, state.size(), stdout);
}
