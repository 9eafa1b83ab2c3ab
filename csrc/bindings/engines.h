// engines.h -- pycomm.hosts.engines, which makes what connects the hosts of a group, as C++ calls it.
#pragma once

#include "../torch/backend.h"
#include "bindings.h"

namespace pycomm {

// engines(store, rank, hosts, labels, token, timeout) -> (backend over all ranks, backend of leaders or None)
MakeWiresWithStore make_wires_by(py::function engines);

}  // namespace pycomm
