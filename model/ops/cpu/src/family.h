// A family of models, as the runtime knows it: one table, registered by the file that defines it.
#pragma once

#include "packer.h"

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

// The tables that a leveled file makes by EVERSTREAM_FAMILY_KERNELS(name, ...), in the order of
// `Level`; those of levels that were not built are null, because nothing defines the weak symbols.
#define EVERSTREAM_KERNELS_OF(name) {&name##_v2, &name##_v3, &name##_v4, &name##_v4dot, &name##_neon}
#define EVERSTREAM_DECLARE_KERNELS(name)                                                    \
    extern const FamilyKernels name##_v2 __attribute__((weak)), name##_v3 __attribute__((weak)), \
        name##_v4 __attribute__((weak)), name##_v4dot __attribute__((weak)),                \
        name##_neon __attribute__((weak))

// Makes a family known, before main.
struct Registration {
    explicit Registration(const Family& family);
};
std::vector<std::string> families();

// Packed weights and the model that points into them.
struct BuiltModel {
    Arena arena;
    const Family* family = nullptr;
    std::shared_ptr<const Model> model;
};

// The model that options and weights describe, by its family. Throws std::invalid_argument where an
// option or a weight is missing, or the family has no kernels for the precision or the level.
BuiltModel build(
    const Options& options, const Weights& weights, const Kernels& kernels, Precision precision);

// What all families read: first the embedding and the sizes, after the layers the norm and the head.
void read_beginning(Model& model, const Options& options, Packer& packer, Precision precision);
void read_end(Model& model, Packer& packer);

Strides strides_of(const Family& family, const Model& model);
// Of a row of n numbers: rows that are a power of two apart would share their places in a cache.
int padded_stride(int n);
void set_buffer(Strides& strides, int place, int stride);

}  // namespace everstream
