// Compiled once per level; see kernels.cpp.
#include "arwkv7_step.h"

EVERSTREAM_FAMILY_KERNELS(arwkv7, Arwkv7Model, Arwkv7Step)
