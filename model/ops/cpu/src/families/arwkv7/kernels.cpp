// Compiled once per level; see kernels.cpp.
#include "families/arwkv7/step.h"

EVERSTREAM_FAMILY_KERNELS(arwkv7, Arwkv7Model, Arwkv7Step)
