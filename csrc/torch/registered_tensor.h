// registered_tensor.h -- tensors in memory that all ranks of a group have registered, on the CPU and on
// devices. Collectives on them, or on views of them, need no staging memory. Used by Communicator.empty
// (bindings/) and torch's allocate_tensor (backend.cc).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "../communicator/communicator.h"

namespace pycomm {

// A contiguous tensor of zeros. Collective: all ranks pass equal sizes, in the order of their other calls;
// where they do not, throws CommError of kind mismatch on every rank. std::invalid_argument, on this rank
// alone: a negative size, a dtype that pycomm does not move. A device without an index is the current one.
//
// The tensor owns its memory, not the group: it may be freed at any time, in any order on the ranks, and
// outlives the group as plain memory.
at::Tensor empty_registered(const std::shared_ptr<Communicator>& comm, const std::vector<int64_t>& shape,
                            at::ScalarType dtype, c10::Device device);

// Where this process finds every rank's part of a tensor from empty_registered (or of a view of one), for
// kernels of the caller that read and write peers' memory. std::invalid_argument: the tensor is not in
// registered memory of this group.
std::vector<uint64_t> peer_addresses(Communicator& comm, const at::Tensor& tensor);

}  // namespace pycomm
