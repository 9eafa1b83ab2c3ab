// device.cc -- see device.h.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>

#include "../op/validate.h"
#include "nccl_side.h"

namespace pycomm {

namespace {

cuda::Stream native(const c10::Stream& stream) { return static_cast<cuda::Stream>(stream.native_handle()); }

cuda::Issue issue_of(c10::Device device, bool async_op, double timeout) {
  cuda::Issue issue;
  issue.stream = native(current_stream(device));
  issue.async_op = async_op;
  issue.timeout = timeout;
  issue.current = [device] { return native(current_stream(device)); };
  return issue;
}

cuda::MessageCall call_of(const at::Tensor& dense, const MessageOptions& options, bool sends) {
  return {sends,
          options.peer,
          options.tag,
          dtype_of(dense),
          static_cast<std::byte*>(dense.data_ptr()),
          static_cast<size_t>(dense.numel())};
}

// Inputs that overlap outputs move to memory of their own, in stream order.
void separate_overlap(Request& request, int rank) {
  Op& op = request.op;
  const Overlap overlap = find_overlap(op, rank);
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(request.device);
  auto copy_of = [&](const std::byte* data, size_t nbytes) {
    at::Tensor copy = at::empty({static_cast<int64_t>(nbytes)}, bytes);
    copy.copy_(at::from_blob(
        const_cast<std::byte*>(data), {static_cast<int64_t>(nbytes)}, {1}, [](void*) {}, bytes,
        request.device));
    request.keep.push_back(copy);
    return static_cast<std::byte*>(copy.data_ptr());
  };
  if (overlap.single) op.in = copy_of(op.in, op.own_count(rank) * size_of(op.dtype));
  if (overlap.parts)
    for (Part& part : op.in_parts)
      if (part.count) part.data = copy_of(part.data, part.count * size_of(op.dtype));
}

}  // namespace

c10::Stream as_torch_stream(cuda::Stream stream, c10::Device device) {
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<int64_t>(stream));
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

cuda::DeviceWorkPtr issue_on_device(Communicator& comm, Request request, bool async_op, bool watched) {
  comm.raise_deferred_error();
  c10::NoGradGuard no_grad;
  if (NcclSide* side = NcclSide::of(comm)) {
    separate_overlap(request, comm.rank());
    return side->issue(std::move(request), async_op);
  }
  cuda::prepare(comm, request.op);
  separate_overlap(request, comm.rank());
  const c10::Device device = request.device;
  cuda::Issue issue = issue_of(device, async_op, request.op.timeout);
  issue.watched = watched;
  cuda::CudaGroup& group = cuda::group_for(comm, request.op.kind, device.index(), issue.stream);
  if (!request.copy_back.empty())
    issue.after = [copy_back = request.copy_back, device](cuda::Stream stream) {
      c10::StreamGuard guard(as_torch_stream(stream, device));
      for (auto& [target, dense] : copy_back) target.copy_(dense);
    };
  // What runs beside the current stream must not be given back to it before it has ended.
  if (async_op) {
    std::vector<Kept> kept(request.keep.begin(), request.keep.end());
    for (const auto& [target, dense] : request.copy_back) {
      kept.emplace_back(target);
      kept.emplace_back(dense);
    }
    issue.keep = [kept = std::move(kept)] {};
  }
  return group.issue(request.op, issue);
}

bool has_worked_on_device(Communicator& comm) { return NcclSide::of(comm) || cuda::group_of(comm); }

bool barrier_on_device(Communicator& comm, double timeout) {
  if (NcclSide* side = NcclSide::of(comm)) {
    side->drain(timeout);
    return false;
  }
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(cuda::group_of(comm)->device()));
  cuda::CudaGroup::of(comm, device.index()).barrier(issue_of(device, false, timeout));
  return true;
}

cuda::DeviceWorkPtr send_on_device(Communicator& comm, const at::Tensor& tensor,
                                   const MessageOptions& options, bool async_op) {
  comm.raise_deferred_error();
  const at::Tensor dense = checked_message(comm.transport(), OpKind::send, tensor, c10::kCUDA);
  if (NcclSide* side = NcclSide::of(comm)) return side->send(dense, options, async_op);
  cuda::Issue issue = issue_of(dense.device(), async_op, options.timeout);
  if (async_op) issue.keep = [kept = Kept(dense)] {};
  return cuda::group_for(comm, OpKind::send, dense.device().index(), issue.stream)
      .issue(call_of(dense, options, true), issue);
}

cuda::DeviceWorkPtr recv_on_device(Communicator& comm, const at::Tensor& tensor,
                                   const MessageOptions& options, bool async_op) {
  comm.raise_deferred_error();
  c10::NoGradGuard no_grad;
  const at::Tensor dense = checked_message(comm.transport(), OpKind::recv, tensor, c10::kCUDA);
  if (NcclSide* side = NcclSide::of(comm)) return side->recv(dense, tensor, options, async_op);
  cuda::Issue issue = issue_of(dense.device(), async_op, options.timeout);
  if (async_op) issue.keep = [dense = Kept(dense), tensor = Kept(tensor)] {};
  if (!dense.is_same(tensor))
    issue.after = [dense, tensor](cuda::Stream stream) {
      c10::StreamGuard guard(as_torch_stream(stream, dense.device()));
      tensor.copy_(dense);
    };
  return cuda::group_for(comm, OpKind::recv, dense.device().index(), issue.stream)
      .issue(call_of(dense, options, false), issue);
}

void enter_line_on_device(Communicator& comm, c10::Device device) {
  cuda::CudaGroup::of(comm, device.index()).enter_line(native(current_stream(device)));
}

void leave_line_on_device(Communicator& comm, c10::Device device) {
  cuda::CudaGroup::of(comm, device.index()).leave_line(native(current_stream(device)));
}

void launch_begins_on_device(Communicator& comm, c10::Device device, uint64_t number) {
  if (auto* group = cuda::group_of(comm)) group->launch_begins(native(current_stream(device)), number);
}

void launch_ends_on_device(Communicator& comm, c10::Device device) {
  if (auto* group = cuda::group_of(comm)) group->launch_ends(native(current_stream(device)));
}

at::Tensor empty_on_device(const std::shared_ptr<Communicator>& comm, const std::vector<int64_t>& shape,
                           at::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  const auto registered =
      cuda::CudaGroup::of(*comm, device.index()).allocate(count * options.dtype().itemsize());
  auto release = [registered, weak = std::weak_ptr(comm)](void*) {
    if (auto alive = weak.lock())
      if (auto* group = cuda::group_of(*alive)) group->release(registered);
  };
  return at::from_blob(registered.data, shape, std::move(release), options, device);
}

}  // namespace pycomm
