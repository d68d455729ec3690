#pragma once

#include <nanobind/nanobind.h>

namespace everstream {

void bind_training(nanobind::module_& m);

}  // namespace everstream
