// messages.cc -- send, recv and barrier of _C.Communicator.
#include "../collectives/send_recv.h"
#include "../torch/device.h"
#include "../torch/interpreter.h"
#include "bindings.h"

namespace pycomm {

namespace {

std::optional<Handle> send(const CommPtr& comm, const at::Tensor& tensor, int dst, int tag, bool async_op,
                           double timeout) {
  WithoutGil no_gil;
  if (tensor.is_cuda()) {
    auto work = send_on_device(*comm, tensor, {dst, tag, timeout}, async_op);
    return async_op ? std::optional(Handle{comm, std::move(work)}) : std::nullopt;
  }
  MessagePtr message = send_tensor(*comm, tensor, {dst, tag, timeout});
  if (async_op) {
    message->help();
    return Handle{comm, message};
  }
  message->wait();
  return std::nullopt;
}

std::optional<Handle> recv(const CommPtr& comm, const at::Tensor& tensor, int src, int tag, bool async_op,
                           double timeout) {
  WithoutGil no_gil;
  if (tensor.is_cuda())
    return Handle{comm, recv_on_device(*comm, tensor, {src, tag, timeout}, async_op), src};
  MessagePtr message = recv_tensor(*comm, tensor, {src, tag, timeout});
  if (async_op) message->help();
  else message->wait();
  return Handle{comm, message};
}

std::optional<Handle> barrier(const CommPtr& comm, bool async_op, double timeout) {
  if (!cuda::group_of(*comm) || async_op)
    return submit(comm, make_barrier(*comm, options_of(0, timeout)), async_op);
  WithoutGil no_gil;
  barrier_on_device(*comm, timeout);
  return std::nullopt;
}

}  // namespace

void bind_messages(CommClass& comm) { comm.def("send", &send).def("recv", &recv).def("barrier", &barrier); }

}  // namespace pycomm
