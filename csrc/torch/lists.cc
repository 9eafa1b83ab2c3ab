// lists.cc -- see lists.h.
#include "lists.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <stdexcept>

#include "../arithmetic/reduce.h"
#include "extent.h"

namespace pycomm {

namespace {

[[noreturn]] void bad(const Communicator& comm, OpKind kind, const std::string& text) {
  throw std::invalid_argument(comm.transport().where({kind, 0}) + text);
}

std::vector<Extent> extents_of(const Tensors& tensors) {
  std::vector<Extent> extents;
  for (const at::Tensor& tensor : tensors) extents.push_back(Extent::of(tensor));
  return extents;
}

// The inputs of operations that run one after the other, input i with output i: those that overlap the output
// of another operation as copies ([Note: inputs are taken first]).
Tensors taken_first(const Tensors& inputs, const Tensors& outputs) {
  const std::vector<Extent> ins = extents_of(inputs), outs = extents_of(outputs);
  std::vector<Extent> all = ins;
  for (size_t i = 0; i < outs.size(); ++i)
    if (!inputs[i].is_same(outputs[i])) all.push_back(outs[i]);
  if (!any_overlap(std::move(all))) return inputs;
  c10::NoGradGuard no_grad;
  Tensors taken = inputs;
  for (size_t i = 0; i < ins.size(); ++i)
    for (size_t j = 0; j < outs.size(); ++j)
      if (i != j && ins[i].overlaps(outs[j])) {
        taken[i] = inputs[i].clone(at::MemoryFormat::Contiguous);
        break;
      }
  return taken;
}

void check_pairs(const Communicator& comm, OpKind kind, size_t outputs, size_t inputs) {
  if (inputs == 0) bad(comm, kind, "got an empty list of tensors");
  if (outputs != inputs)
    bad(comm, kind, "got " + std::to_string(outputs) + " outputs for " + std::to_string(inputs) + " inputs");
}

// Several tensors of one rank must be alike.
void check_alike(const Communicator& comm, OpKind kind, const Tensors& tensors) {
  const at::Tensor& first = tensors[0];
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const std::string which = "tensor " + std::to_string(i) + " of the list ";
    if (tensor.layout() != at::kStrided || !tensor.device().is_cpu())
      bad(comm, kind,
          which +
              "is not a dense CPU tensor; with several tensors per rank all must be. For one operation "
              "per tensor call the coalesced form");
    if (tensor.scalar_type() != first.scalar_type() || tensor.sizes() != first.sizes())
      bad(comm, kind,
          which +
              "differs from tensor 0 in dtype or shape; several tensors per rank must be alike. For one "
              "operation per tensor call the coalesced form");
  }
}

bool rounds(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

}  // namespace

std::vector<Request> make_all_reduce_coalesced(Communicator& comm, const Tensors& tensors,
                                               Reduction reduction, const CallOptions& options) {
  check_pairs(comm, OpKind::all_reduce, tensors.size(), tensors.size());
  const Tensors inputs = taken_first(tensors, tensors);
  std::vector<Request> requests;
  for (size_t i = 0; i < tensors.size(); ++i)
    requests.push_back(make_all_reduce(comm, inputs[i], tensors[i], reduction, options));
  return requests;
}

std::vector<Request> make_all_gather_coalesced(Communicator& comm, const Tensors& inputs,
                                               const Lists& outputs, const CallOptions& options) {
  const OpKind kind = OpKind::all_gather;
  if (outputs.size() != static_cast<size_t>(comm.world_size()))
    bad(comm, kind,
        "got " + std::to_string(outputs.size()) + " lists for " + std::to_string(comm.world_size()) +
            " ranks");
  std::vector<Extent> all = extents_of(inputs);
  for (const Tensors& list : outputs) {
    check_pairs(comm, kind, list.size(), inputs.size());
    for (const at::Tensor& tensor : list) all.push_back(Extent::of(tensor));
  }
  const bool apart = !any_overlap(std::move(all));
  c10::NoGradGuard no_grad;
  std::vector<Request> requests;
  Lists results = outputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_ranks;
    for (Tensors& list : results) {
      if (!apart) list[i] = at::empty(list[i].sizes(), list[i].options());
      of_ranks.push_back(list[i]);
    }
    const at::Tensor input = apart ? inputs[i] : inputs[i].clone(at::MemoryFormat::Contiguous);
    requests.push_back(make_all_gather(comm, input, of_ranks, options));
  }
  if (!apart)
    for (size_t rank = 0; rank < outputs.size(); ++rank)
      for (size_t i = 0; i < inputs.size(); ++i)
        requests.back().copy_back.emplace_back(outputs[rank][i], results[rank][i]);
  return requests;
}

std::vector<Request> make_all_gather_flat_coalesced(Communicator& comm, const Tensors& inputs,
                                                    const Tensors& outputs, const CallOptions& options) {
  check_pairs(comm, OpKind::all_gather, outputs.size(), inputs.size());
  const Tensors taken = taken_first(inputs, outputs);
  std::vector<Request> requests;
  for (size_t i = 0; i < inputs.size(); ++i)
    requests.push_back(make_all_gather_flat(comm, taken[i], outputs[i], options));
  return requests;
}

std::vector<Request> make_reduce_scatter_flat_coalesced(Communicator& comm, const Tensors& inputs,
                                                        const Tensors& outputs, Reduction reduction,
                                                        const CallOptions& options) {
  check_pairs(comm, OpKind::reduce_scatter, outputs.size(), inputs.size());
  const Tensors taken = taken_first(inputs, outputs);
  std::vector<Request> requests;
  for (size_t i = 0; i < inputs.size(); ++i)
    requests.push_back(make_reduce_scatter_flat(comm, taken[i], outputs[i], reduction, options));
  return requests;
}

// This rank's tensors are folded into one, and that is reduced over the ranks. 16-bit floats stay in fp32
// until the end, so that they are rounded once.
Request make_all_reduce_several(Communicator& comm, const Tensors& tensors, Reduction reduction,
                                const CallOptions& options) {
  const OpKind kind = OpKind::all_reduce;
  check_alike(comm, kind, tensors);
  if (reduction.op == ReduceOp::avg)
    bad(comm, kind, "avg of several tensors per rank is not defined; reduce with sum, then divide");
  c10::NoGradGuard no_grad;
  Tensors sources;
  std::vector<const void*> addresses;
  for (const at::Tensor& tensor : tensors) {
    sources.push_back((rounds(tensor) ? tensor.to(at::kFloat) : tensor).contiguous());
    addresses.push_back(sources.back().const_data_ptr());
  }
  const at::Tensor fold = at::empty(sources[0].sizes(), sources[0].options());
  const DType dtype = dtype_of(fold);
  if (!reduce_supported(dtype, reduction.op))
    bad(comm, kind,
        std::string("reduce op ") + to_string(reduction.op) + " is not defined for dtype " +
            to_string(dtype));
  reduce({dtype, reduction.op, reduction.factor}, addresses.data(), static_cast<int>(addresses.size()),
         fold.data_ptr(), fold.numel());
  if (reduction.op == ReduceOp::premul_sum) reduction = {ReduceOp::sum, 1};
  Request request = make_all_reduce(comm, fold, fold, reduction, options);
  for (const at::Tensor& tensor : tensors) request.copy_back.emplace_back(tensor, fold);
  return request;
}

Request make_all_gather_several(Communicator& comm, const Tensors& inputs, const Lists& outputs,
                                const CallOptions& options) {
  const OpKind kind = OpKind::all_gather;
  check_pairs(comm, kind, outputs.size(), inputs.size());
  check_alike(comm, kind, inputs);
  const size_t total = inputs.size() * comm.world_size();
  for (const Tensors& list : outputs) {
    if (list.size() != total)
      bad(comm, kind,
          "got a list of " + std::to_string(list.size()) + " outputs for " + std::to_string(inputs.size()) +
              " tensors of each of " + std::to_string(comm.world_size()) + " ranks");
    Tensors alike = list;
    alike.insert(alike.begin(), inputs[0]);
    check_alike(comm, kind, alike);
  }
  c10::NoGradGuard no_grad;
  const at::Tensor flat = at::stack(inputs);
  std::vector<int64_t> sizes = flat.sizes().vec();
  sizes[0] = static_cast<int64_t>(total);
  const at::Tensor gathered = at::empty(sizes, flat.options());
  Request request = make_all_gather_flat(comm, flat, gathered, options);
  const Tensors results = gathered.unbind();
  for (const Tensors& list : outputs)
    for (size_t i = 0; i < total; ++i) request.copy_back.emplace_back(list[i], results[i]);
  return request;
}

Request make_broadcast_several(Communicator& comm, const Tensors& tensors, int root, int root_tensor,
                               const CallOptions& options) {
  check_alike(comm, OpKind::broadcast, tensors);
  const at::Tensor& source = tensors[root_tensor];
  Request request = make_broadcast(comm, source, root, options);
  for (const at::Tensor& tensor : tensors)
    if (!tensor.is_same(source)) request.copy_back.emplace_back(tensor, source);
  return request;
}

}  // namespace pycomm
