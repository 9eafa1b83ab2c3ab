// device.h -- requests on CUDA tensors: into the streams that torch says are current, by way of c10's
// device-generic guard, so that the same source builds against a torch without CUDA.
#pragma once

#include <c10/core/Stream.h>

#include "../cuda/prepare.h"
#include "tensors.h"

namespace pycomm {

c10::Device torch_device(const cuda::CudaGroup& group);

// Enqueues after the current stream of the request's device: on it, or (async_op) beside it. Returns at once;
// the work completes by itself if it is asynchronous or `watched`. Throws as any call, also what earlier
// operations of the group ended with.
cuda::CudaWorkPtr issue_on_device(Communicator& comm, Request request, bool async_op, bool watched = false);

// Blocks the host until all ranks have come and the current stream is done. For a group that has worked on a
// device (cuda::group_of).
void barrier_on_device(Communicator& comm, double timeout);

cuda::CudaWorkPtr send_on_device(Communicator& comm, const at::Tensor& tensor, const MessageOptions& options,
                                 bool async_op);
cuda::CudaWorkPtr recv_on_device(Communicator& comm, const at::Tensor& tensor, const MessageOptions& options,
                                 bool async_op);

// A tensor of zeros in registered memory of all ranks; collective.
at::Tensor empty_on_device(const std::shared_ptr<Communicator>& comm, const std::vector<int64_t>& shape,
                           at::ScalarType dtype, c10::Device device);

}  // namespace pycomm
