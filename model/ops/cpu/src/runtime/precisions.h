// Precisions by their names in Python and in GGUF.
#pragma once

#include <string>
#include <vector>

#include "runtime/model.h"

namespace everstream {

// What a model is held in. Throws std::invalid_argument for any other name.
Precision precision_of(const std::string& name);
// The same, or what a matrix of a model of int4 is held in: a type of GGUF.
Precision held_precision_of(const std::string& name);
// What GGUF calls the types that matrices may be held in.
std::vector<std::string> gguf_names();

}  // namespace everstream
