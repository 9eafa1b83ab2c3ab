// engines.h -- what of pycomm.hosts makes the connections between the hosts of a group, as C++ calls it.
#pragma once

#include "../torch/backend.h"
#include "bindings.h"

namespace pycomm {

// engines: (engines, nccl, checks), see pycomm/hosts/__init__.py.
//
//   engines(store, rank, hosts, labels, token, timeout, look)
//       -> (backend over all ranks, backend of leaders or None)
//   nccl(store, rank, hosts, labels, token, timeout, device, look) -> backend over all ranks
//   checks() -> "before", "beside" or "off"
MakersWithStore makers_by(const py::tuple& engines);

}  // namespace pycomm
