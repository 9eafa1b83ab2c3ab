// prepare.h -- what every call on device memory begins with, whatever front end it comes from.
#pragma once

#include "group.h"

namespace pycomm::cuda {

// The CUDA side of a group that has worked on a device; else nullptr. Groups that span hosts have another one
// (torch/nccl_side.h).
CudaGroup* group_of(Communicator& comm);

// The same, made where it is missing: see CudaGroup::of. Making it allocates, which a graph capture of
// `stream` forbids: then std::invalid_argument.
CudaGroup& group_for(Communicator& comm, OpKind kind, Device device, Stream stream);

// Fills in the algorithm that the group was told to use, and refuses what is malformed on this rank alone.
void prepare(Communicator& comm, Op& op);

}  // namespace pycomm::cuda
