// Packs a checkpoint's weights into a `Model` for one level and precision.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels.h"

namespace everstream {

// float32 numbers by name, row major; `keep` holds their owner.
struct Weight {
    const float* data = nullptr;
    std::vector<int64_t> shape;
    std::shared_ptr<void> keep;
};
using Weights = std::function<Weight(const std::string&)>;

// The options of a model by name; see runtime.py for what they are.
struct Options {
    std::unordered_map<std::string, double> numbers;
    std::unordered_map<std::string, std::string> names;
    std::vector<StateOffsets> states;  // by layer

    double number(const std::string& name) const;
    int integer(const std::string& name) const { return int(number(name)); }
    const std::string& text(const std::string& name) const;
};

class Builder {
public:
    // Throws std::invalid_argument where an option or a weight is missing or has another shape.
    Builder(const Options& options, const Weights& weights, const Kernels& kernels, Precision precision);
    const Model& model() const { return model_; }
    size_t num_bytes() const { return num_bytes_; }

private:
    // Rows of a product: parts of a checkpoint's matrices, one under the other.
    struct Part {
        Weight weight;
        Weight bias;  // or empty
    };
    void read_options(const Options& options);
    void read_layer(const Options& options, int index);
    void read_features(const std::string& prefix, Layer& layer);
    void read_gates(const std::string& prefix, Layer& layer);

    Weight weight(const std::string& name, std::vector<int64_t> shape) const;
    Part part(const std::string& name, int64_t n, int64_t k, bool has_bias) const;
    Matrix pack(const std::vector<Part>& parts, Precision precision, bool paired = false);
    Table table(const Weight& weight);
    Norm norm(const std::string& name);
    const float* copy(const Weight& weight);
    // [groups][rows][columns] to [groups][columns][rows], times `by` [groups][rows] if given.
    const float* transposed(const Weight& weight, int64_t groups, int64_t rows, int64_t columns, const float* by = nullptr);
    const float* head_decays(bool xpos);
    template <class T>
    T* allocate(size_t count);

    struct Free {
        void operator()(void* memory) const;
    };
    const Weights& weights_;
    const Kernels& kernels_;
    Model model_;
    std::vector<Layer> layers_;
    std::vector<std::unique_ptr<void, Free>> slabs_;
    char* next_ = nullptr;  // in the last slab
    size_t slab_left_ = 0, num_bytes_ = 0;
};

}  // namespace everstream
