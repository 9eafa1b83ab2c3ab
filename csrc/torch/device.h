// device.h -- requests on CUDA tensors: into the streams that torch says are current, by way of c10's
// device-generic guard, so that the same source builds against a torch without CUDA.
#pragma once

#include <c10/core/Stream.h>

#include "../cuda/prepare.h"
#include "tensors.h"

namespace pycomm {

// Of groups within a host by our kernels, of those that span hosts by NCCL (nccl_side.h).

c10::Stream current_stream(c10::Device device);
// A stream that torch did not make: its id is the handle itself, as in c10::cuda::getStreamFromExternal.
c10::Stream as_torch_stream(cuda::Stream stream, c10::Device device);

// Enqueues after the current stream of the request's device: on it, or (async_op) beside it. Returns at once;
// the work completes by itself if it is asynchronous or `watched`. Throws as any call, also what earlier
// operations of the group ended with.
cuda::DeviceWorkPtr issue_on_device(Communicator& comm, Request request, bool async_op, bool watched = false);

// Whether a barrier has to wait for a device, too.
bool has_worked_on_device(Communicator& comm);
// Blocks the host until the current stream is done. For a group that has worked on a device. True: all ranks
// have come, too; false, over hosts: that is left to a barrier on the CPU.
bool barrier_on_device(Communicator& comm, double timeout);

cuda::DeviceWorkPtr send_on_device(Communicator& comm, const at::Tensor& tensor,
                                   const MessageOptions& options, bool async_op);
cuda::DeviceWorkPtr recv_on_device(Communicator& comm, const at::Tensor& tensor,
                                   const MessageOptions& options, bool async_op);

// Before and behind a launch into the current stream whose blocks wait for those of the peers; of groups that
// have worked on the device. See CudaGroup::enter_line.
void enter_line_on_device(Communicator& comm, c10::Device device);
void leave_line_on_device(Communicator& comm, c10::Device device);
// Around it while a trace goes on. See CudaGroup::launch_begins.
void launch_begins_on_device(Communicator& comm, c10::Device device, uint64_t number);
void launch_ends_on_device(Communicator& comm, c10::Device device);

// A tensor of zeros in registered memory of all ranks; collective.
at::Tensor empty_on_device(const std::shared_ptr<Communicator>& comm, const std::vector<int64_t>& shape,
                           at::ScalarType dtype, c10::Device device);

}  // namespace pycomm
