// ucx.h -- the classes that pycomm/hosts/ucx.py makes.
#pragma once

#include "bindings.h"

namespace pycomm {

void bind_ucx(py::module_& module);

}  // namespace pycomm
