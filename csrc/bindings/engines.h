// engines.h -- what of pycomm.hosts makes the connections between the hosts of a group, as C++ calls it.
#pragma once

#include "../torch/backend.h"
#include "bindings.h"

namespace pycomm {

// engines: (engines, nccl, checks), see pycomm/hosts/__init__.py.
//
//   engines(store, rank, hosts, labels, token, timeout, look)
//       -> (backend over all ranks, backend of leaders or None, point)
//   point: shrink(comm, exclude, exactly, timeout) -> (comm, ranks); is_left, which is set here: () ->
//       whether this rank has closed the group; bell: an eventfd that rings when it has
//   nccl(store, rank, hosts, labels, token, timeout, device, look) -> backend over all ranks
//   checks() -> "before", "beside" or "off"
MakersWithStore makers_by(const py::tuple& engines);

// What engines() gave as the point of this group; None: it is on one host.
py::object point_of(Communicator& comm);

}  // namespace pycomm
