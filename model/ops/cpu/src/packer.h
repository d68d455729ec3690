// Packs a checkpoint's weights for one level: matrices in panels, tables, small vectors. Large
// tensors are asked for some rows at a time, so that no copy of one in float32 is ever held.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"

namespace everstream {

// float32 numbers, row major; `keep` holds their owner.
struct Weight {
    const float* data = nullptr;
    std::vector<int64_t> shape;
    std::shared_ptr<void> keep;
};

// A checkpoint's tensors by name. Both functions throw where there is none of that name.
struct Weights {
    std::function<std::vector<int64_t>(const std::string& name)> shape;
    std::function<Weight(const std::string& name, int64_t begin, int64_t end)> rows;
};

// The options of a model by name; see options.py for what they are.
struct Options {
    std::unordered_map<std::string, double> numbers;
    std::unordered_map<std::string, std::string> names;
    // Byte offsets of a layer's state tensors in a session's block.
    std::vector<std::unordered_map<std::string, size_t>> states;

    double number(const std::string& name) const;
    int integer(const std::string& name) const { return int(number(name)); }
    const std::string& text(const std::string& name) const;
    // The offset of a tensor that the layer must have.
    size_t state(int layer, const std::string& name) const;
};

// Rows of a product: a checkpoint's matrix [n, k] by its name, with a bias [n] or none.
struct Part {
    std::string name;
    int64_t n = 0, k = 0;
    bool has_bias = false;
};

// The memory of a model's weights.
class Arena {
public:
    size_t num_bytes() const { return num_bytes_; }
    // Zeroed, from slabs of whole huge pages, one piece after the other: a step reads them front to
    // back.
    template <class T>
    T* allocate(size_t count) {
        return reinterpret_cast<T*>(take(count * sizeof(T)));
    }

private:
    struct Slab {
        explicit Slab(size_t size);
        ~Slab();
        Slab(Slab&& other) noexcept
            : base(std::exchange(other.base, nullptr)), begin(other.begin), mapped(other.mapped),
              num_bytes(other.num_bytes) {}
        Slab& operator=(Slab&&) = delete;

        char *base = nullptr, *begin = nullptr;
        size_t mapped = 0, num_bytes = 0;
    };
    char* take(size_t size);

    std::vector<Slab> slabs_;
    char* next_ = nullptr;  // in the last slab
    size_t slab_left_ = 0, num_bytes_ = 0;
};

class Packer {
public:
    Packer(const Weights& weights, const Kernels& kernels, Arena& arena)
        : arena(arena), weights_(weights), kernels_(kernels) {}

    // A whole tensor. Throws std::invalid_argument where it has another shape.
    Weight weight(const std::string& name, const std::vector<int64_t>& shape) const;
    // The parts one under the other. `paired`: each panel has half a panel of the first half of the
    // rows, and theirs of the second half.
    Matrix pack(const std::vector<Part>& parts, Precision precision, bool paired = false);
    Table table(const std::string& name, int64_t n, int64_t k, Precision precision);
    const float* copy(const Weight& weight);
    // [groups][rows][columns] to [groups][columns][rows], times `by` [groups][rows] if given.
    const float* transposed(
        const Weight& weight, int64_t groups, int64_t rows, int64_t columns,
        const float* by = nullptr);
    Arena& arena;

private:
    void check(const std::string& name, const std::vector<int64_t>& shape) const;
    // Calls `use(first row, number of rows, numbers)` for all rows of a matrix, some at a time.
    template <class Use>
    void each_rows(const std::string& name, int64_t n, int64_t k, Use use) const;
    void pack_rows(const Matrix& w, int64_t at, int64_t num, const float* rows);

    const Weights& weights_;
    const Kernels& kernels_;
    std::vector<uint32_t> words_;
    std::vector<uint16_t> halves_;
};

}  // namespace everstream
