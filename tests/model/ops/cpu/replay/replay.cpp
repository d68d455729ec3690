// Runs a model without Python: reads its options, weights and texts from the file that
// recording.py writes, feeds the texts in one batch, and writes the logits after the last token of each,
// and their states.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>

#include "runtime/levels.h"
#include "runtime/precisions.h"
#include "runtime/runtime.h"

using namespace everstream;

namespace {

// What a matrix is held in in a model of int4, and its blocks, row by row.
struct Held {
    Precision precision;
    std::vector<uint8_t> blocks;
};

struct Recording {
    Options options;
    std::map<std::string, Weight> weights;
    std::map<std::string, Held> held;
    std::vector<std::vector<int32_t>> texts;
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

Held read_held(std::istream& in) {
    std::string precision;
    size_t num_bytes;
    in >> precision >> num_bytes;
    Held held{held_precision_of(precision), std::vector<uint8_t>(num_bytes)};
    in.ignore(1);
    in.read(reinterpret_cast<char*>(held.blocks.data()), std::streamsize(num_bytes));
    return held;
}

std::vector<int32_t> read_text(std::istream& in) {
    size_t length;
    in >> length;
    std::vector<int32_t> text(length);
    for (int32_t& token : text) in >> token;
    return text;
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
    weights.held_as = [&r](const std::string& name) { return r.held.at(name).precision; };
    weights.blocks = [&r](const std::string& name, int64_t begin, int64_t end) {
        const std::vector<uint8_t>& all = r.held.at(name).blocks;
        const size_t row_bytes = all.size() / size_t(r.weights.at(name).shape[0]);
        Blocks blocks;
        blocks.data = all.data() + size_t(begin) * row_bytes;
        blocks.num_bytes = size_t(end - begin) * row_bytes;
        return blocks;
    };
    return weights;
}

// Also "inf", which streams do not read.
double read_number(std::istream& in) {
    std::string text;
    in >> text;
    return std::stod(text);
}

Recording read(const char* path) {
    Recording r;
    std::ifstream in(path, std::ios::binary);
    std::string kind, name;
    while (in >> kind) {
        if (kind == "number") in >> name, r.options.numbers[name] = read_number(in);
        else if (kind == "name") in >> name >> r.options.names[name];
        else if (kind == "offset") read_offset(in, r.options);
        else if (kind == "weight") in >> name, r.weights[name] = read_weight(in);
        else if (kind == "held") in >> name, r.held[name] = read_held(in);
        else if (kind == "text") r.texts.push_back(read_text(in));
        else throw std::invalid_argument(kind);
    }
    return r;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) return 2;
    const Recording r = read(argv[1]);
    const auto vocab_size = int(r.weights.at("embedding.weight").shape[0]);
    Runtime runtime(r.options, weights_of(r), argv[3], precision_of(argv[2]), 2, vocab_size);
    const size_t state_bytes = runtime.model().state_bytes;
    std::vector<char> states(r.texts.size() * state_bytes);
    Draw draw;
    draw.temperature = 0.0f;
    std::vector<Feed> feeds;
    for (const std::vector<int32_t>& text : r.texts) {
        Feed feed;
        feed.state = states.data() + feeds.size() * state_bytes;
        feed.tokens = text.data();
        feed.num_tokens = int(text.size());
        feed.draw = &draw;
        feed.num_draws = 1;
        feeds.push_back(feed);
    }
    runtime.run(feeds);
    for (size_t i = 0; i < feeds.size(); i++)
        std::fwrite(runtime.logits(int(i)), sizeof(float), size_t(vocab_size), stdout);
    std::fwrite(states.data(), 1, states.size(), stdout);
}
