#include "runtime/precisions.h"

#include <stdexcept>

#include "products/gguf_blocks.h"

namespace everstream {

Precision precision_of(const std::string& name) {
    if (name == "float32") return Precision::float32;
    if (name == "bfloat16") return Precision::bfloat16;
    if (name == "int8") return Precision::int8;
    if (name == "int4") return Precision::int4;
    throw std::invalid_argument("no precision '" + name + "'");
}

Precision held_precision_of(const std::string& name) {
    for (const Precision type : GGUF_TYPES)
        if (name == gguf_block(type).name) return type;
    return precision_of(name);
}

std::vector<std::string> gguf_names() {
    std::vector<std::string> names;
    for (const Precision type : GGUF_TYPES) names.emplace_back(gguf_block(type).name);
    return names;
}

}  // namespace everstream
