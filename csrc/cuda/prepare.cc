// prepare.cc -- see prepare.h.
#include "prepare.h"

#include <stdexcept>

namespace pycomm::cuda {

CudaGroup* group_of(Communicator& comm) {
  return comm.hosts_side() ? nullptr : static_cast<CudaGroup*>(comm.device_side());
}

CudaGroup& group_for(Communicator& comm, OpKind kind, Device device, Stream stream) {
  if (!comm.device_side() && driver() && capture_of(stream).active)
    throw std::invalid_argument(comm.transport().where({kind, 0}) +
                                "the first CUDA operation of a group cannot be captured, since it sets the "
                                "device side up. Run one before.");
  return CudaGroup::of(comm, device);
}

void prepare(Communicator& comm, Op& op) {
  const Algorithm wished = comm.default_algorithm(op.kind);  // may be for the CPU only
  if (op.algorithm == Algorithm::automatic && has_cuda_algorithm(op.kind, wished)) op.algorithm = wished;
  comm.refuse_malformed(op);
}

}  // namespace pycomm::cuda
