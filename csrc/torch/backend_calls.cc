// backend_calls.cc -- the collectives and messages of PycommBackend: torch's arguments to tasks (tensors.h).
// See backend.h.
#include "../communicator/monitored_barrier.h"
#include "backend.h"
#include "lists.h"
#include "sparse.h"
#include "timeouts.h"

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

Tensors concatenated(const Lists& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// A Work whose result is as many lists of tensors.
WorkPtr in_lists(WorkPtr work, size_t lists) {
  if (work) static_cast<TorchWork&>(*work).set_lists(lists);
  return work;
}

}  // namespace

void PycommBackend::bad(OpKind kind, const std::string& text) const {
  throw std::invalid_argument(comm_->transport().where({kind, 0}) + text);
}

CallOptions PycommBackend::call_options(OpKind kind, std::chrono::milliseconds timeout) const {
  CallOptions options;
  options.timeout = seconds_of(timeout);
  options.algorithm = options_->algorithms[static_cast<size_t>(kind)];
  return options;
}

// Where a call takes one tensor (or one list) of each rank.
const at::Tensor& PycommBackend::single(OpKind kind, const Tensors& tensors) const {
  if (tensors.size() != 1)
    bad(kind, "got " + std::to_string(tensors.size()) +
                  " tensors, expected one; for several call the coalesced form");
  return tensors[0];
}

const Tensors& PycommBackend::single(OpKind kind, const Lists& lists) const {
  if (lists.size() != 1) bad(kind, "got " + std::to_string(lists.size()) + " lists of tensors, expected one");
  return lists[0];
}

// Only the root of a gather or scatter passes a list, as on Gloo and NCCL. On another rank it would stay
// unread.
const Tensors& PycommBackend::of_root(OpKind kind, const Lists& lists, int root) const {
  static const Tensors none;
  if (rank_ == root) return single(kind, lists);
  for (const Tensors& list : lists)
    if (!list.empty())
      bad(kind, "got a list of " + std::to_string(list.size()) + " tensors, but rank " +
                    std::to_string(root) + " is the root; pass none on the other ranks");
  return none;
}

WorkPtr PycommBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto kind = OpKind::broadcast;
  const int root = static_cast<int>(opts.rootRank);
  if (opts.rootTensor < 0 || opts.rootTensor >= static_cast<int64_t>(tensors.size()))
    bad(kind, "rootTensor=" + std::to_string(opts.rootTensor) + " is not in the list of " +
                  std::to_string(tensors.size()) + " tensors");
  const CallOptions options = call_options(kind, opts.timeout);
  auto task = tensors.size() == 1
                  ? make_broadcast(*comm_, tensors[0], root, options)
                  : make_broadcast_several(*comm_, tensors, root, static_cast<int>(opts.rootTensor), options);
  return submitter_.submit({OpType::BROADCAST, "pycomm:broadcast", opts.timeout, opts.asyncOp},
                           std::move(task), tensors, tensors);
}

WorkPtr PycommBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto kind = OpKind::all_reduce;
  if (tensors.empty()) bad(kind, "got an empty list of tensors");
  const Reduction reduction = reduction_of(opts.reduceOp);
  const CallOptions options = call_options(kind, opts.timeout);
  if (tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  auto task = tensors.size() == 1 ? make_all_reduce(*comm_, tensors[0], tensors[0], reduction, options)
                                  : make_all_reduce_several(*comm_, tensors, reduction, options);
  return submitter_.submit({OpType::ALLREDUCE, "pycomm:all_reduce", opts.timeout, opts.asyncOp},
                           std::move(task), tensors, tensors);
}

WorkPtr PycommBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto kind = OpKind::all_reduce;
  if (tensors.empty()) bad(kind, "got an empty list of tensors");
  const TorchCall call{OpType::_ALLREDUCE_SPARSE, "pycomm:all_reduce", opts.timeout, opts.asyncOp,
                       "pycomm:sparse_all_reduce"};
  auto task =
      make_sparse_all_reduce(*comm_, tensors, reduction_of(opts.reduceOp), call_options(kind, opts.timeout));
  return submitter_.submit(call, std::move(task), tensors, tensors);
}

WorkPtr PycommBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  const auto kind = OpKind::all_reduce;
  auto tasks = make_all_reduce_coalesced(*comm_, tensors, reduction_of(opts.reduceOp),
                                         call_options(kind, opts.timeout));
  return submitter_.submit_all({OpType::ALLREDUCE_COALESCED, "pycomm:allreduce_coalesced", opts.timeout,
                                opts.asyncOp, "pycomm:all_reduce"},
                               std::move(tasks), tensors, tensors);
}

WorkPtr PycommBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto kind = OpKind::reduce;
  const at::Tensor& tensor = single(kind, tensors);
  const int root = static_cast<int>(opts.rootRank);
  if (opts.rootTensor != 0)
    bad(kind, "rootTensor=" + std::to_string(opts.rootTensor) + ", but a reduce has one tensor per rank");
  auto task = make_reduce(*comm_, tensor, tensor, root, reduction_of(opts.reduceOp),
                          call_options(kind, opts.timeout));
  return submitter_.submit({OpType::REDUCE, "pycomm:reduce", opts.timeout, opts.asyncOp}, std::move(task),
                           tensors, tensors);
}

WorkPtr PycommBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const auto kind = OpKind::all_gather;
  const TorchCall call{OpType::ALLGATHER, "pycomm:all_gather", opts.timeout, opts.asyncOp};
  const CallOptions options = call_options(kind, opts.timeout);
  if (inputs.size() == 1) {
    const Tensors& output = single(kind, outputs);
    return submitter_.submit(call, make_all_gather(*comm_, inputs[0], output, options), inputs, output);
  }
  auto task = make_all_gather_several(*comm_, inputs, outputs, options);
  return in_lists(submitter_.submit(call, std::move(task), inputs, concatenated(outputs)), outputs.size());
}

WorkPtr PycommBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& opts) {
  auto task = make_all_gather_flat(*comm_, input, output, call_options(OpKind::all_gather, opts.timeout));
  return submitter_.submit({OpType::_ALLGATHER_BASE, "pycomm:_all_gather_base", opts.timeout, opts.asyncOp},
                           std::move(task), input, output);
}

WorkPtr PycommBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& opts) {
  auto tasks =
      make_all_gather_coalesced(*comm_, inputs, outputs, call_options(OpKind::all_gather, opts.timeout));
  const TorchCall call{OpType::ALLGATHER_COALESCED, "pycomm:all_gather", opts.timeout, opts.asyncOp};
  return in_lists(submitter_.submit_all(call, std::move(tasks), inputs, concatenated(outputs)),
                  outputs.size());
}

WorkPtr PycommBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& opts) {
  auto tasks =
      make_all_gather_flat_coalesced(*comm_, inputs, outputs, call_options(OpKind::all_gather, opts.timeout));
  return submitter_.submit_all(
      {OpType::COALESCED, "pycomm:all_gather_into_tensor_coalesced", opts.timeout, opts.asyncOp},
      std::move(tasks), inputs, outputs);
}

WorkPtr PycommBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const auto kind = OpKind::gather;
  const int root = static_cast<int>(opts.rootRank);
  const Tensors& output = of_root(kind, outputs, root);
  auto task = make_gather(*comm_, single(kind, inputs), output, root, call_options(kind, opts.timeout));
  return submitter_.submit({OpType::GATHER, "pycomm:gather", opts.timeout, opts.asyncOp}, std::move(task),
                           inputs, output);
}

WorkPtr PycommBackend::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  const auto kind = OpKind::gather;
  const int root = static_cast<int>(opts.rootRank);
  Tensors parts;
  if (rank_ == root) {
    if (output.numel() != input.numel() * size_ || !output.is_contiguous())
      bad(kind, "the output must be contiguous and have world_size * " + std::to_string(input.numel()) +
                    " elements");
    parts = output.view({size_, input.numel()}).unbind();
  }
  auto task = make_gather(*comm_, input, parts, root, call_options(kind, opts.timeout));
  return submitter_.submit({OpType::GATHER, "pycomm:gather", opts.timeout, opts.asyncOp}, std::move(task),
                           input, rank_ == root ? at::TensorList(output) : at::TensorList());
}

WorkPtr PycommBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) {
  const auto kind = OpKind::scatter;
  const int root = static_cast<int>(opts.rootRank);
  const Tensors& input = of_root(kind, inputs, root);
  auto task = make_scatter(*comm_, input, single(kind, outputs), root, call_options(kind, opts.timeout));
  return submitter_.submit({OpType::SCATTER, "pycomm:scatter", opts.timeout, opts.asyncOp}, std::move(task),
                           input, outputs);
}

WorkPtr PycommBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                      const c10d::ReduceScatterOptions& opts) {
  const auto kind = OpKind::reduce_scatter;
  const Tensors& input = single(kind, inputs);
  auto task = make_reduce_scatter(*comm_, input, single(kind, outputs), reduction_of(opts.reduceOp),
                                  call_options(kind, opts.timeout));
  return submitter_.submit({OpType::REDUCE_SCATTER, "pycomm:reduce_scatter", opts.timeout, opts.asyncOp},
                           std::move(task), input, outputs);
}

WorkPtr PycommBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& opts) {
  auto task = make_reduce_scatter_flat(*comm_, input, output, reduction_of(opts.reduceOp),
                                       call_options(OpKind::reduce_scatter, opts.timeout));
  return submitter_.submit(
      {OpType::_REDUCE_SCATTER_BASE, "pycomm:_reduce_scatter_base", opts.timeout, opts.asyncOp},
      std::move(task), input, output);
}

WorkPtr PycommBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& opts) {
  auto tasks = make_reduce_scatter_flat_coalesced(*comm_, inputs, outputs, reduction_of(opts.reduceOp),
                                                  call_options(OpKind::reduce_scatter, opts.timeout));
  return submitter_.submit_all(
      {OpType::COALESCED, "pycomm:reduce_scatter_tensor_coalesced", opts.timeout, opts.asyncOp},
      std::move(tasks), inputs, outputs);
}

WorkPtr PycommBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                     std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                     const c10d::AllToAllOptions& opts) {
  auto task = make_all_to_all_flat(*comm_, input, output, {input_splits, output_splits},
                                   call_options(OpKind::all_to_all, opts.timeout));
  return submitter_.submit({OpType::ALLTOALL_BASE, "pycomm:all_to_all", opts.timeout, opts.asyncOp},
                           std::move(task), input, output);
}

WorkPtr PycommBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  auto task = make_all_to_all(*comm_, inputs, outputs, call_options(OpKind::all_to_all, opts.timeout));
  return submitter_.submit({OpType::ALLTOALL, "pycomm:all_to_all", opts.timeout, opts.asyncOp},
                           std::move(task), inputs, outputs);
}

WorkPtr PycommBackend::barrier(const c10d::BarrierOptions& opts) {
  // A group that has worked on a device waits for its stream as well, and as on any backend holds up the
  // host.
  if (has_worked_on_device(*comm_)) {
    try {
      barrier_on_device(*comm_, call_options(OpKind::barrier, opts.timeout).timeout);
    } catch (const CommError& error) {
      throw TorchCommError(error);
    }
  }
  auto task = make_barrier(*comm_, call_options(OpKind::barrier, opts.timeout));
  return submitter_.submit({OpType::BARRIER, "pycomm:barrier", opts.timeout, opts.asyncOp}, std::move(task),
                           {}, {});
}

// Here a timeout of 0 is none at all, not the group's.
void PycommBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const double timeout =
      opts.timeout == c10d::kUnsetTimeout ? seconds_of_group(options_->timeout) : seconds_of(opts.timeout);
  try {
    comm_->raise_deferred_error();
    monitored_barrier(*comm_, timeout, wait_all_ranks);
  } catch (const CommError& error) {
    throw TorchCommError(error);
  }
}

WorkPtr PycommBackend::send(Tensors& tensors, int dst, int tag) {
  return submitter_.submit_message({OpType::SEND, "pycomm:send", "pycomm:send", dst, tag},
                                   single(OpKind::send, tensors));
}

WorkPtr PycommBackend::recv(Tensors& tensors, int src, int tag) {
  return submitter_.submit_message({OpType::RECV, "pycomm:recv", "pycomm:recv", src, tag},
                                   single(OpKind::recv, tensors));
}

WorkPtr PycommBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor& tensor = single(OpKind::recv, tensors);
  if (tensor.is_cuda()) bad(OpKind::recv, "a CUDA tensor is received from a definite source; pass src");
  return submitter_.submit_message(
      {OpType::RECVANYSOURCE, "pycomm:recv", "pycomm:recvAnySource", any_source, tag}, tensor);
}

}  // namespace pycomm
