// backend_calls.cc -- the collectives and messages of PycommBackend: torch's arguments to tasks (tensors.h). See backend.h.
#include "backend.h"

namespace pycomm {

namespace {

using c10d::OpType;

Reduction reduction_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return {ReduceOp::sum, 1};
    case c10d::ReduceOp::AVG: return {ReduceOp::avg, 1};
    case c10d::ReduceOp::PRODUCT: return {ReduceOp::product, 1};
    case c10d::ReduceOp::MIN: return {ReduceOp::min, 1};
    case c10d::ReduceOp::MAX: return {ReduceOp::max, 1};
    case c10d::ReduceOp::BAND: return {ReduceOp::band, 1};
    case c10d::ReduceOp::BOR: return {ReduceOp::bor, 1};
    case c10d::ReduceOp::BXOR: return {ReduceOp::bxor, 1};
    case c10d::ReduceOp::PREMUL_SUM: {
      auto* supplement = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (!supplement) throw std::invalid_argument("pycomm: PREMUL_SUM without a factor");
      if (!supplement->tensor_factor.defined()) return {ReduceOp::premul_sum, supplement->double_factor};
      return {ReduceOp::premul_sum, supplement->tensor_factor.item().toDouble()};
    }
    default: throw std::invalid_argument("pycomm: unknown reduce op " + std::to_string(op.op_));
  }
}

}  // namespace

void PycommBackend::bad(OpKind kind, const std::string& text) const {
  throw std::invalid_argument(comm_->transport().where({kind, 0}) + text);
}

CallOptions PycommBackend::call_options(OpKind kind, std::chrono::milliseconds timeout) const {
  CallOptions options;
  if (timeout > kNoTimeout) options.timeout = std::chrono::duration<double>(timeout).count();  // else unset: the group's
  options.algorithm = options_->algorithms[static_cast<size_t>(kind)];
  return options;
}

// torch passes one tensor (or one list) per device of the process; there is one.
const at::Tensor& PycommBackend::single(OpKind kind, const Tensors& tensors) const {
  if (tensors.size() != 1)
    bad(kind, "got " + std::to_string(tensors.size()) + " tensors, expected one; for several call the coalesced form");
  return tensors[0];
}

const Tensors& PycommBackend::single(OpKind kind, const Lists& lists) const {
  if (lists.size() != 1) bad(kind, "got " + std::to_string(lists.size()) + " lists of tensors, expected one");
  return lists[0];
}

void PycommBackend::check_pairs(OpKind kind, size_t outputs, size_t inputs) const {
  if (outputs != inputs) bad(kind, "got " + std::to_string(outputs) + " outputs for " + std::to_string(inputs) + " inputs");
}

PycommBackend::WorkPtr PycommBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto kind = OpKind::broadcast;
  auto task = make_broadcast(*comm_, single(kind, tensors), static_cast<int>(opts.rootRank), call_options(kind, opts.timeout));
  return submit({OpType::BROADCAST, "pycomm:broadcast", opts.timeout, opts.asyncOp}, std::move(task), tensors, tensors);
}

PycommBackend::WorkPtr PycommBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto kind = OpKind::all_reduce;
  const at::Tensor& tensor = single(kind, tensors);
  auto task = make_all_reduce(*comm_, tensor, tensor, reduction_of(opts.reduceOp), call_options(kind, opts.timeout));
  return submit({OpType::ALLREDUCE, "pycomm:all_reduce", opts.timeout, opts.asyncOp}, std::move(task), tensors, tensors);
}

PycommBackend::WorkPtr PycommBackend::allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) {
  bad(OpKind::all_reduce, "sparse tensors are not supported; convert them with .to_dense(), or gather their indices and values");
}

PycommBackend::WorkPtr PycommBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  const auto kind = OpKind::all_reduce;
  std::vector<Request> tasks;
  for (const at::Tensor& tensor : tensors)
    tasks.push_back(make_all_reduce(*comm_, tensor, tensor, reduction_of(opts.reduceOp), call_options(kind, opts.timeout)));
  return submit_all({OpType::ALLREDUCE_COALESCED, "pycomm:allreduce_coalesced", opts.timeout, opts.asyncOp}, std::move(tasks), tensors,
                    tensors);
}

PycommBackend::WorkPtr PycommBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto kind = OpKind::reduce;
  const at::Tensor& tensor = single(kind, tensors);
  const int root = static_cast<int>(opts.rootRank);
  auto task = make_reduce(*comm_, tensor, tensor, root, reduction_of(opts.reduceOp), call_options(kind, opts.timeout));
  return submit({OpType::REDUCE, "pycomm:reduce", opts.timeout, opts.asyncOp}, std::move(task), tensors, tensors);
}

PycommBackend::WorkPtr PycommBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const auto kind = OpKind::all_gather;
  const Tensors& output = single(kind, outputs);
  auto task = make_all_gather(*comm_, single(kind, inputs), output, call_options(kind, opts.timeout));
  return submit({OpType::ALLGATHER, "pycomm:all_gather", opts.timeout, opts.asyncOp}, std::move(task), inputs, output);
}

PycommBackend::WorkPtr PycommBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  auto task = make_all_gather_flat(*comm_, input, output, call_options(OpKind::all_gather, opts.timeout));
  return submit({OpType::_ALLGATHER_BASE, "pycomm:_all_gather_base", opts.timeout, opts.asyncOp}, std::move(task), input, output);
}

// outputs[rank][i] is input i of that rank.
PycommBackend::WorkPtr PycommBackend::allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const auto kind = OpKind::all_gather;
  if (outputs.size() != static_cast<size_t>(size_))
    bad(kind, "got " + std::to_string(outputs.size()) + " lists for " + std::to_string(size_) + " ranks");
  Tensors flat;
  std::vector<Request> tasks;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_ranks;
    for (const Tensors& list : outputs) {
      check_pairs(kind, list.size(), inputs.size());
      of_ranks.push_back(list[i]);
    }
    tasks.push_back(make_all_gather(*comm_, inputs[i], of_ranks, call_options(kind, opts.timeout)));
    flat.insert(flat.end(), of_ranks.begin(), of_ranks.end());
  }
  return submit_all({OpType::ALLGATHER_COALESCED, "pycomm:all_gather", opts.timeout, opts.asyncOp}, std::move(tasks), inputs, flat);
}

PycommBackend::WorkPtr PycommBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                      const c10d::AllgatherOptions& opts) {
  const auto kind = OpKind::all_gather;
  check_pairs(kind, outputs.size(), inputs.size());
  std::vector<Request> tasks;
  for (size_t i = 0; i < inputs.size(); ++i)
    tasks.push_back(make_all_gather_flat(*comm_, inputs[i], outputs[i], call_options(kind, opts.timeout)));
  return submit_all({OpType::COALESCED, "pycomm:all_gather_into_tensor_coalesced", opts.timeout, opts.asyncOp}, std::move(tasks), inputs,
                    outputs);
}

PycommBackend::WorkPtr PycommBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const auto kind = OpKind::gather;
  const int root = static_cast<int>(opts.rootRank);
  const Tensors none;
  const Tensors& output = rank_ == root ? single(kind, outputs) : none;
  auto task = make_gather(*comm_, single(kind, inputs), output, root, call_options(kind, opts.timeout));
  return submit({OpType::GATHER, "pycomm:gather", opts.timeout, opts.asyncOp}, std::move(task), inputs, output);
}

PycommBackend::WorkPtr PycommBackend::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  const auto kind = OpKind::gather;
  const int root = static_cast<int>(opts.rootRank);
  Tensors parts;
  if (rank_ == root) {
    if (output.numel() != input.numel() * size_ || !output.is_contiguous())
      bad(kind, "the output must be contiguous and have world_size * " + std::to_string(input.numel()) + " elements");
    parts = output.view({size_, input.numel()}).unbind();
  }
  auto task = make_gather(*comm_, input, parts, root, call_options(kind, opts.timeout));
  return submit({OpType::GATHER, "pycomm:gather", opts.timeout, opts.asyncOp}, std::move(task), input,
                rank_ == root ? at::TensorList(output) : at::TensorList());
}

PycommBackend::WorkPtr PycommBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  const auto kind = OpKind::scatter;
  const int root = static_cast<int>(opts.rootRank);
  const Tensors none;
  const Tensors& input = rank_ == root ? single(kind, inputs) : none;
  auto task = make_scatter(*comm_, input, single(kind, outputs), root, call_options(kind, opts.timeout));
  return submit({OpType::SCATTER, "pycomm:scatter", opts.timeout, opts.asyncOp}, std::move(task), input, outputs);
}

PycommBackend::WorkPtr PycommBackend::reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) {
  const auto kind = OpKind::reduce_scatter;
  const Tensors& input = single(kind, inputs);
  auto task = make_reduce_scatter(*comm_, input, single(kind, outputs), reduction_of(opts.reduceOp), call_options(kind, opts.timeout));
  return submit({OpType::REDUCE_SCATTER, "pycomm:reduce_scatter", opts.timeout, opts.asyncOp}, std::move(task), input, outputs);
}

PycommBackend::WorkPtr PycommBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  auto task =
      make_reduce_scatter_flat(*comm_, input, output, reduction_of(opts.reduceOp), call_options(OpKind::reduce_scatter, opts.timeout));
  return submit({OpType::_REDUCE_SCATTER_BASE, "pycomm:_reduce_scatter_base", opts.timeout, opts.asyncOp}, std::move(task), input, output);
}

PycommBackend::WorkPtr PycommBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                      const c10d::ReduceScatterOptions& opts) {
  const auto kind = OpKind::reduce_scatter;
  check_pairs(kind, outputs.size(), inputs.size());
  std::vector<Request> tasks;
  for (size_t i = 0; i < inputs.size(); ++i)
    tasks.push_back(make_reduce_scatter_flat(*comm_, inputs[i], outputs[i], reduction_of(opts.reduceOp), call_options(kind, opts.timeout)));
  return submit_all({OpType::COALESCED, "pycomm:reduce_scatter_tensor_coalesced", opts.timeout, opts.asyncOp}, std::move(tasks), inputs,
                    outputs);
}

PycommBackend::WorkPtr PycommBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  auto task = make_all_to_all_flat(*comm_, input, output, input_splits, output_splits, call_options(OpKind::all_to_all, opts.timeout));
  return submit({OpType::ALLTOALL_BASE, "pycomm:all_to_all", opts.timeout, opts.asyncOp}, std::move(task), input, output);
}

PycommBackend::WorkPtr PycommBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  auto task = make_all_to_all(*comm_, inputs, outputs, call_options(OpKind::all_to_all, opts.timeout));
  return submit({OpType::ALLTOALL, "pycomm:all_to_all", opts.timeout, opts.asyncOp}, std::move(task), inputs, outputs);
}

PycommBackend::WorkPtr PycommBackend::barrier(const c10d::BarrierOptions& opts) {
  // A group that has worked on a device waits for its stream as well, and as on any backend holds up the host.
  if (const auto device = device_of(*comm_)) {
    try {
      barrier_on_device(*comm_, *device, call_options(OpKind::barrier, opts.timeout).timeout);
    } catch (const CommError& error) {
      throw TorchCommError(error);
    }
  }
  auto task = make_barrier(*comm_, call_options(OpKind::barrier, opts.timeout));
  return submit({OpType::BARRIER, "pycomm:barrier", opts.timeout, opts.asyncOp}, std::move(task), {}, {});
}

void PycommBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
  TensorTask task(*comm_, make_barrier(*comm_, call_options(OpKind::barrier, opts.timeout)));
  run_now({OpType::BARRIER, "pycomm:barrier", opts.timeout, false}, task, {}, {});
}

PycommBackend::WorkPtr PycommBackend::send(Tensors& tensors, int dst, int tag) {
  const at::Tensor& tensor = single(OpKind::send, tensors);
  if (tensor.is_cuda()) return submit_device_message(OpType::SEND, "pycomm:send", tensor, dst, tag);
  MessagePtr message = send_tensor(static_cast<PointToPoint&>(*comm_->background()), tensor, dst, tag, 0);
  return submit_message(OpType::SEND, "pycomm:send", std::move(message), dst, tensor);
}

PycommBackend::WorkPtr PycommBackend::recv(Tensors& tensors, int src, int tag) {
  const at::Tensor& tensor = single(OpKind::recv, tensors);
  if (tensor.is_cuda()) return submit_device_message(OpType::RECV, "pycomm:recv", tensor, src, tag);
  MessagePtr message = recv_tensor(static_cast<PointToPoint&>(*comm_->background()), tensor, src, tag, 0);
  return submit_message(OpType::RECV, "pycomm:recv", std::move(message), src, tensor);
}

PycommBackend::WorkPtr PycommBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = single(OpKind::recv, tensors);
  if (tensor.is_cuda()) bad(OpKind::recv, "a CUDA tensor is received from a definite source; pass src");
  MessagePtr message = recv_tensor(static_cast<PointToPoint&>(*comm_->background()), tensor, any_source, tag, 0);
  return submit_message(OpType::RECVANYSOURCE, "pycomm:recv", std::move(message), any_source, tensor);
}

}  // namespace pycomm
