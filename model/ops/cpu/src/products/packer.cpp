#include "products/packer.h"

#include "products/gguf_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace everstream {

namespace {

constexpr size_t ALIGNMENT = 64, HUGE_PAGE = size_t(2) << 20, SLAB = 4 * HUGE_PAGE;
// Numbers that are asked for at a time.
constexpr int64_t SLICE = int64_t(1) << 20;

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

size_t panel_bytes(const Matrix& w) {
    const size_t count = size_t(w.k_padded) * size_t(w.panel);
    if (has_blocks(w.precision)) {
        const GgufBlock block = gguf_block(w.precision);
        return count / size_t(block.weights) * size_t(block.num_bytes());
    }
    return count * (w.precision == Precision::float32 ? 4 : w.precision == Precision::bfloat16 ? 2 : 1);
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

size_t Options::state(int layer, const std::string& name) const {
    const auto& fields = states.at(size_t(layer));
    const auto found = fields.find(name);
    if (found == fields.end()) throw std::invalid_argument("state '" + name + "' is missing");
    return found->second;
}

// Pages of its own and not the heap's, where what others have freed would count as in use.
Arena::Slab::Slab(size_t size) : num_bytes(size) {
#if defined(__linux__)
    mapped = size + HUGE_PAGE;  // to begin at a huge page; what is not touched takes no memory
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base = static_cast<char*>(memory);
    begin = base + (HUGE_PAGE - reinterpret_cast<uintptr_t>(base) % HUGE_PAGE) % HUGE_PAGE;
    madvise(begin, size, MADV_HUGEPAGE);
#else
    base = begin = static_cast<char*>(std::aligned_alloc(HUGE_PAGE, size));
    if (!base) throw std::bad_alloc();
    std::memset(begin, 0, size);
#endif
}

Arena::Slab::~Slab() {
#if defined(__linux__)
    if (base) munmap(base, mapped);
#else
    std::free(base);
#endif
}

char* Arena::take(size_t size) {
    const size_t bytes = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes > slab_left_) {
        const Slab& slab = slabs_.emplace_back((bytes + SLAB - 1) / SLAB * SLAB);
        next_ = slab.begin;
        slab_left_ = slab.num_bytes;
    }
    char* result = next_;
    next_ += bytes;
    slab_left_ -= bytes;
    num_bytes_ += bytes;
    return result;
}

Weight Packer::read_rows(const std::string& name, int64_t begin, int64_t end) const {
    std::vector<int64_t> shape = weights_.shape(name);
    shape[0] = end - begin;
    Weight w = weights_.rows(name, begin, end);
    if (w.shape != shape) throw std::invalid_argument("weight '" + name + "' has another shape");
    return w;
}

Weight Packer::weight(const std::string& name) const {
    return read_rows(name, 0, weights_.shape(name).at(0));
}

std::pair<int64_t, int64_t> Packer::sizes(const std::string& name) const {
    const std::vector<int64_t> shape = weights_.shape(name);
    if (shape.size() != 2) throw std::invalid_argument("weight '" + name + "' has another shape");
    return {shape[0], shape[1]};
}

template <class Use>
void Packer::each_rows(const std::string& name, Use use) const {
    const auto [n, k] = sizes(name);
    const int64_t step = std::max<int64_t>(1, SLICE / k);
    for (int64_t begin = 0; begin < n; begin += step) {
        const int64_t num = std::min(step, n - begin);
        const Weight slice = read_rows(name, begin, begin + num);
        use(begin, num, slice.data);
    }
}

const float* Packer::copy(const Weight& weight) {
    size_t count = 1;
    for (int64_t n : weight.shape) count *= size_t(n);
    // Room for a whole vector beyond the end.
    float* out = arena.allocate<float>(count + 64);
    std::memcpy(out, weight.data, count * sizeof(float));
    return out;
}

Norm Packer::norm(const std::string& name) {
    return {vector(name + ".weight"), has(name + ".bias") ? vector(name + ".bias") : nullptr};
}

const float* Packer::transposed(const Weight& weight, int64_t groups, const float* by) {
    const int64_t columns = weight.shape.back();
    int64_t rows = 1;
    for (int64_t n : weight.shape) rows *= n;
    rows /= groups * columns;
    float* out = arena.allocate<float>(size_t(groups * rows * columns) + 64);
    for (int64_t g = 0; g < groups; g++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                out[(g * columns + c) * rows + r] =
                    weight.data[(g * rows + r) * columns + c] * (by ? by[g * rows + r] : 1.0f);
    return out;
}

template <class Use>
void Packer::each_blocks(const std::string& name, size_t row_bytes, Use use) const {
    const auto [n, k] = sizes(name);
    const int64_t step = std::max<int64_t>(1, SLICE / k);
    for (int64_t begin = 0; begin < n; begin += step) {
        const int64_t num = std::min(step, n - begin);
        const Blocks slice = weights_.blocks(name, begin, begin + num);
        if (slice.num_bytes != size_t(num) * row_bytes)
            throw std::invalid_argument("weight '" + name + "' has other blocks");
        use(begin, num, slice.data);
    }
}

Precision Packer::held(const std::vector<std::string>& names, Precision wanted) const {
    if (wanted != Precision::int4) return wanted;
    const Precision first = weights_.held_as(names.at(0));
    const auto differs = [&](const std::string& name) { return weights_.held_as(name) != first; };
    return std::any_of(names.begin(), names.end(), differs) ? Precision::int8 : first;
}

Table Packer::table(const std::string& name, Precision wanted) {
    Precision precision = held({name}, wanted);
    if (is_gguf(precision) && precision != Precision::q8_0) precision = Precision::int8;
    const int64_t n = sizes(name).first, k = sizes(name).second;
    Table table;
    table.precision = precision;
    table.n = int(n), table.k = int(k);
    const size_t count = size_t(n * k), width = size_t(k);
    if (precision == Precision::float32) {
        float* data = arena.allocate<float>(count + 64);
        each_rows(name, [&](int64_t begin, int64_t num, const float* rows) {
            std::memcpy(data + begin * k, rows, size_t(num * k) * sizeof(float));
        });
        table.data = data;
    } else if (precision == Precision::bfloat16) {
        uint16_t* data = arena.allocate<uint16_t>(count);
        each_rows(name, [&](int64_t begin, int64_t num, const float* rows) {
            std::transform(rows, rows + num * k, data + begin * k, to_bf16);
        });
        table.data = data;
    } else if (precision == Precision::int4) {
        const size_t groups = (width + GROUP - 1) / GROUP, bytes = GROUP / 2 + 2;
        char* data = arena.allocate<char>(size_t(n) * groups * bytes);
        words_.resize(groups * GROUP / 8), halves_.resize(groups);
        each_rows(name, [&](int64_t begin, int64_t num, const float* rows) {
            for (int64_t i = 0; i < num; i++) {
                kernels_.round_int4(rows + i * k, int(k), words_.data(), halves_.data());
                char* to = data + size_t(begin + i) * groups * bytes;
                for (size_t g = 0; g < groups; g++, to += bytes) {
                    std::memcpy(to, words_.data() + g * GROUP / 8, GROUP / 2);
                    std::memcpy(to + GROUP / 2, halves_.data() + g, 2);
                }
            }
        });
        table.data = data;
    } else if (precision == Precision::q8_0) {
        const GgufBlock block = gguf_block(precision);
        const size_t row_bytes = width / size_t(block.weights) * size_t(block.file_bytes);
        uint8_t* data = arena.allocate<uint8_t>(size_t(n) * row_bytes);
        each_blocks(name, row_bytes, [&](int64_t begin, int64_t num, const uint8_t* rows) {
            std::memcpy(data + size_t(begin) * row_bytes, rows, size_t(num) * row_bytes);
        });
        table.data = data;
    } else {
        int8_t* data = arena.allocate<int8_t>(count);
        float* scale = arena.allocate<float>(size_t(n));
        each_rows(name, [&](int64_t begin, int64_t num, const float* rows) {
            for (int64_t i = 0; i < num; i++) {
                const float* row = rows + i * k;
                const float by = scale[begin + i] = row_scale(row, k);
                int8_t* to = data + (begin + i) * k;
                for (size_t j = 0; j < width; j++) to[j] = to_int8(row[j], by);
            }
        });
        table.data = data, table.scale = scale;
    }
    return table;
}

// Rows `at` to `at + num` of the packed matrix, all of one part. Each is rounded to words of four
// bytes, and these are written from the part's beginning to its end.
void Packer::pack_rows(const Matrix& w, int64_t at, int64_t num, const float* rows) {
    if (w.precision == Precision::int4) return pack_int4_rows(w, at, num, rows);
    const size_t P = size_t(w.part), k = size_t(w.k), n = size_t(num);
    const size_t part_bytes = w.panel_bytes / size_t(w.panel / w.part);
    const size_t length = part_bytes / 4 / P;  // words of a row
    const size_t stride = length + 16;         // rows a power of two apart would share cache lines
    words_.assign(n * stride, 0);
    for (size_t r = 0; r < n; r++) {
        const float* row = rows + r * k;
        uint32_t* to = words_.data() + r * stride;
        if (w.precision == Precision::float32) {
            std::memcpy(to, row, k * sizeof(float));
        } else if (w.precision == Precision::bfloat16) {
            halves_.resize(k);
            std::transform(row, row + k, halves_.begin(), to_bf16);
            std::memcpy(to, halves_.data(), k * sizeof(uint16_t));
        } else {
            const float scale = row_scale(row, w.k);
            const int more = kernels_.has_dot ? 128 : 0;
            auto* q = reinterpret_cast<uint8_t*>(to);
            for (size_t i = 0; i < k; i++) q[i] = uint8_t(to_int8(row[i], scale) + more);
            const_cast<float*>(w.scale)[size_t(at) + r] = scale;
        }
    }
    char* begin = const_cast<char*>(static_cast<const char*>(w.data)) + size_t(at) / P * part_bytes;
    uint32_t* out = reinterpret_cast<uint32_t*>(begin) + size_t(at) % P;
    for (size_t j = 0; j < length; j++)
        for (size_t r = 0; r < n; r++) out[j * P + r] = words_[r * stride + j];
}

void Packer::pack_int4_rows(const Matrix& w, int64_t at, int64_t num, const float* rows) {
    constexpr size_t WORDS = GROUP / 8;  // of a row of a group
    const size_t P = size_t(w.part), n = size_t(num), groups = size_t(w.k_padded) / GROUP;
    const size_t group_bytes = P * (GROUP / 2 + 2);
    words_.resize(n * groups * WORDS), halves_.resize(n * groups);
    for (size_t r = 0; r < n; r++)
        kernels_.round_int4(
            rows + r * size_t(w.k), w.k, words_.data() + r * groups * WORDS,
            halves_.data() + r * groups);
    char* to = const_cast<char*>(static_cast<const char*>(w.data));
    to += size_t(at) / P * groups * group_bytes;
    for (size_t g = 0; g < groups; g++, to += group_bytes) {
        uint32_t* words = reinterpret_cast<uint32_t*>(to) + size_t(at) % P;
        uint16_t* scales = reinterpret_cast<uint16_t*>(to + P * GROUP / 2) + size_t(at) % P;
        for (size_t r = 0; r < n; r++) {
            const uint32_t* from = words_.data() + (r * groups + g) * WORDS;
            for (size_t i = 0; i < WORDS; i++) words[i * P + r] = from[i];
            scales[r] = halves_[r * groups + g];
        }
    }
}

void Packer::pack_rows(const Matrix& w, int64_t at, int64_t num, const uint8_t* blocks) {
    const GgufBlock block = gguf_block(w.precision);
    const int more = kernels_.has_dot ? 128 : 0;
    const size_t P = size_t(w.part), num_blocks = size_t(w.k_padded / block.weights);
    const size_t part_bytes = w.panel_bytes / size_t(w.panel / w.part);
    char* part = const_cast<char*>(static_cast<const char*>(w.data)) + size_t(at) / P * part_bytes;
    for (size_t r = 0; r < size_t(num); r++)
        pack_gguf(
            w.precision, blocks + r * num_blocks * size_t(block.file_bytes), num_blocks, more, part, P,
            size_t(at) % P + r);
}

Matrix Packer::pack(
    const std::vector<std::string>& names, Precision wanted, Rows rows_lie, Bias bias_is) {
    const bool paired = rows_lie == Rows::paired;
    const auto adds_bias = [&](const std::string& name) {
        return bias_is == Bias::added && has(name + ".bias");
    };
    std::vector<std::string> keys;
    for (const std::string& name : names) keys.push_back(name + ".weight");
    Matrix w;
    w.precision = held(keys, wanted);
    w.panel = kernels_.panel, w.part = kernels_.part;
    const GgufBlock block = gguf_block(w.precision);
    const int multiple = has_blocks(w.precision) ? block.weights : 4;
    w.k = int(sizes(keys.at(0)).second), w.k_padded = (w.k + multiple - 1) / multiple * multiple;
    int64_t num = 0;
    bool has_bias = false;
    for (const std::string& name : names) {
        const auto [n, k] = sizes(name + ".weight");
        if (k != w.k) throw std::invalid_argument("weight '" + name + ".weight' has another shape");
        num += n, has_bias = has_bias || adds_bias(name);
    }
    // Paired rows come in pairs of half panels, of which the last may not be full.
    const int64_t half = w.panel / 2, pairs = (num / 2 + half - 1) / half;
    w.n = int(paired ? pairs * w.panel : num);
    w.panel_bytes = panel_bytes(w);
    const size_t padded_n = size_t(w.num_panels()) * size_t(w.panel);
    w.data = arena.allocate<char>(size_t(w.num_panels()) * w.panel_bytes);
    if (w.precision == Precision::int8) w.scale = arena.allocate<float>(padded_n);
    float* bias = has_bias ? arena.allocate<float>(padded_n) : nullptr;
    w.bias = bias;
    const auto place = [&](int64_t row) {
        if (!paired) return row;
        const int64_t side = row / (num / 2), i = row % (num / 2);
        return i / half * w.panel + side * half + i % half;
    };
    const auto run_of = [&](int64_t row) {  // rows from this one on with places in order
        const int64_t i = row % (num / 2);
        return std::min(half - i % half, num / 2 - i);
    };
    int64_t first = 0;
    const auto pack_slice = [&](int64_t begin, int64_t n, const auto* rows, size_t stride) {
        for (int64_t i = 0, num = 0; i < n; i += num) {
            const int64_t at = place(first + begin + i), left = w.part - at % w.part;
            // Paired rows lie next to each other up to the end of their half.
            num = std::min(n - i, paired ? std::min(left, run_of(first + begin + i)) : left);
            pack_rows(w, at, num, rows + size_t(i) * stride);
        }
    };
    const size_t row_bytes = size_t(w.k / block.weights) * size_t(block.file_bytes);
    for (const std::string& name : names) {
        if (is_gguf(w.precision))
            each_blocks(name + ".weight", row_bytes, [&](int64_t begin, int64_t n, const uint8_t* rows) {
                pack_slice(begin, n, rows, row_bytes);
            });
        else
            each_rows(name + ".weight", [&](int64_t begin, int64_t n, const float* rows) {
                pack_slice(begin, n, rows, size_t(w.k));
            });
        if (adds_bias(name)) {
            const Weight values = weight(name + ".bias");
            for (int64_t i = 0; i < values.shape[0]; i++) bias[place(first + i)] = values.data[i];
        }
        first += sizes(name + ".weight").first;
    }
    return w;
}

}  // namespace everstream
