// Packs a checkpoint's weights for one level: matrices in panels, tables, small vectors. Large
// tensors are asked for some rows at a time, so that no copy of one in float32 is ever held.
#pragma once

#include <functional>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/kernels.h"

namespace everstream {

// float32 numbers, row major; `keep` holds their owner.
struct Weight {
    const float* data = nullptr;
    std::vector<int64_t> shape;
    std::shared_ptr<void> keep;
};

// Rows of a matrix in the blocks of its file.
struct Blocks {
    const uint8_t* data = nullptr;
    size_t num_bytes = 0;
    std::shared_ptr<void> keep;
};

// A checkpoint's tensors by name, with the shapes that the config lists; who gives them has compared
// these. `shape` and `rows` throw where there is none of that name.
struct Weights {
    std::function<bool(const std::string& name)> has;  // whether the config lists one
    std::function<std::vector<int64_t>(const std::string& name)> shape;
    std::function<Weight(const std::string& name, int64_t begin, int64_t end)> rows;
    // What a matrix is held in where int4 is asked for: int4, int8, or a type of GGUF, of which
    // `blocks` gives rows as they are in the file.
    std::function<Precision(const std::string& name)> held_as;
    std::function<Blocks(const std::string& name, int64_t begin, int64_t end)> blocks;
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

    // Objects that need no destructor.
    template <class T>
    T* make(int count) {
        return new (allocate<T>(size_t(count))) T[size_t(count)];
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

// How the rows of a packed matrix lie; paired: each panel has half a panel of the first half of the
// rows, and theirs of the second half.
enum class Rows { plain, paired };
// Whether products add the bias; where it is left out the caller does.
enum class Bias { added, left_out };

class Packer {
public:
    Packer(
        const Weights& weights, const Kernels& kernels, Arena& arena, const Model* base = nullptr)
        : arena(arena), base(base), weights_(weights), kernels_(kernels) {}

    bool has(const std::string& name) const { return weights_.has(name); }
    // A whole tensor.
    Weight weight(const std::string& name) const;
    // The matrices `name`.weight [n, k] one under the other, and `name`.bias [n] where one has it.
    Matrix pack(
        const std::vector<std::string>& names, Precision wanted, Rows rows = Rows::plain,
        Bias bias = Bias::added);
    Table table(const std::string& name, Precision wanted);
    const float* copy(const Weight& weight);
    const float* vector(const std::string& name) { return copy(weight(name)); }
    // `name`.weight, and `name`.bias where there is one.
    Norm norm(const std::string& name);
    // [groups][rows][columns] to [groups][columns][rows], times `by` [groups][rows] if given; the
    // groups and rows may share axes.
    const float* transposed(const Weight& weight, int64_t groups, const float* by = nullptr);
    Arena& arena;
    const Model* const base;  // whose embedding and head are taken, or null

private:
    Weight read_rows(const std::string& name, int64_t begin, int64_t end) const;
    // The shape of a matrix. Throws std::invalid_argument where it is none.
    std::pair<int64_t, int64_t> sizes(const std::string& name) const;
    // Calls `use(first row, number of rows, numbers)` for all rows of a matrix, some at a time.
    template <class Use>
    void each_rows(const std::string& name, Use use) const;
    // The same of the blocks that a matrix has in its file, [rows][row_bytes].
    template <class Use>
    void each_blocks(const std::string& name, size_t row_bytes, Use use) const;
    // The precision that a matrix of these names is held in where `wanted` is asked for: int8 where
    // they differ.
    Precision held(const std::vector<std::string>& names, Precision wanted) const;
    void pack_rows(const Matrix& w, int64_t at, int64_t num, const float* rows);
    void pack_rows(const Matrix& w, int64_t at, int64_t num, const uint8_t* blocks);
    void pack_int4_rows(const Matrix& w, int64_t at, int64_t num, const float* rows);

    const Weights& weights_;
    const Kernels& kernels_;
    std::vector<uint32_t> words_;
    std::vector<uint16_t> halves_;
};

}  // namespace everstream
