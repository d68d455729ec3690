// Compiled once per level; see kernels.cpp.
#include "families/llama/step.h"

EVERSTREAM_FAMILY_KERNELS(llama, LlamaModel, LlamaStep)
