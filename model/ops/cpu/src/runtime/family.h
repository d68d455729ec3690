// A family of models, as the runtime knows it: one table, registered by the file that defines it.
#pragma once

#include "products/packer.h"

namespace everstream {

struct Family {
    const char* name;  // that options ask for
    std::vector<Precision> precisions;
    // The model. Throws std::invalid_argument where an option or a weight is missing.
    std::shared_ptr<const Model> (*build)(const Options&, Packer&, Precision);
    // Sets what a step needs beyond the width and the vocabulary.
    void (*set_strides)(const Model&, Strides&);
    const FamilyKernels* kernels[NUM_LEVELS];  // null where a level was not built
};

// Adds a family to those that `build` looks for.
struct Registration {
    explicit Registration(const Family& family);
};

// Registers a family when the module is loaded: its name, build, set_strides and precisions. A file
// that is compiled once per level defines the kernels by EVERSTREAM_FAMILY_KERNELS (step.h). The
// symbols are weak: the address of a level that was not built is null.
#define EVERSTREAM_FAMILY(name, build, set_strides, ...)                                       \
    extern const FamilyKernels name##_v2 __attribute__((weak)), name##_v3 __attribute__((weak)), \
        name##_v4 __attribute__((weak)), name##_v4dot __attribute__((weak)),                   \
        name##_amx __attribute__((weak)), name##_neon __attribute__((weak));                   \
    const Family name##_family = {                                                             \
        #name, {__VA_ARGS__}, build, set_strides,                                              \
        {&name##_v2, &name##_v3, &name##_v4, &name##_v4dot, &name##_amx, &name##_neon}};       \
    const Registration name##_registration(name##_family);
std::vector<std::string> families();

// Packed weights and the model that points into them.
struct BuiltModel {
    Arena arena;
    const Family* family = nullptr;
    std::shared_ptr<const Model> model;
};

// The model that options and weights describe, by its family. It has the embedding and the head of
// `base` where that is not null, which must outlive it. Throws std::invalid_argument where an
// option or a weight is missing, or the family has no kernels for the precision or the level.
BuiltModel build(
    const Options& options, const Weights& weights, const Kernels& kernels, Precision precision,
    const Model* base);

// What all families read: first the embedding and the sizes, after the layers the norm and the head.
void read_beginning(Model& model, const Options& options, Packer& packer, Precision precision);
void read_end(Model& model, Packer& packer);
// Of `half` pairs of channels with rotary positions: theta^(-i / half).
double* rope_frequencies(Packer& packer, double theta, int half);
// `block`mlp_norm and `block`mlp.
Mlp read_mlp(Packer& packer, const std::string& block, Precision precision);

Strides strides_of(const Family& family, const Model& model);
// Of a row of n numbers: rows that are a power of two apart would share their places in a cache.
int padded_stride(int n);
void set_buffer(Strides& strides, int place, int stride);

}  // namespace everstream
