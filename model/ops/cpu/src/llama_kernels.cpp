// Compiled once per level; see kernels.cpp.
#include "llama_step.h"

EVERSTREAM_FAMILY_KERNELS(llama, LlamaModel, LlamaStep)
