// nccl_calls.cc -- see nccl_calls.h.
#include "nccl_calls.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <optional>

namespace pycomm {

namespace {

using Lists = std::vector<Tensors>;

// How elements are named on the way: `per_element` items of `type` are one of ours.
struct Form {
  at::ScalarType type = at::kByte;
  size_t per_element = 1;
  c10d::ReduceOp reduce_op = c10d::ReduceOp::SUM;
};

std::optional<c10d::ReduceOp> simple(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return c10d::ReduceOp(c10d::ReduceOp::SUM);
    case ReduceOp::product: return c10d::ReduceOp(c10d::ReduceOp::PRODUCT);
    case ReduceOp::min: return c10d::ReduceOp(c10d::ReduceOp::MIN);
    case ReduceOp::max: return c10d::ReduceOp(c10d::ReduceOp::MAX);
    default: return std::nullopt;
  }
}

// As torch's own function makes it, which has another name in 2.11 than in later versions. (ReduceOp's
// constructor with a supplement drops the supplement.)
c10d::ReduceOp premul_sum(double factor) {
  c10d::ReduceOp op;
  op.op_ = c10d::ReduceOp::PREMUL_SUM;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
  return op;
}

std::optional<Form> floating(at::ScalarType type, const Op& op, size_t per_element) {
  if (op.reduce_op == ReduceOp::avg) return Form{type, per_element, c10d::ReduceOp::AVG};
  if (op.reduce_op == ReduceOp::premul_sum) return Form{type, per_element, premul_sum(op.factor)};
  const bool real = per_element == 1 || op.reduce_op == ReduceOp::sum;
  const std::optional<c10d::ReduceOp> reduce_op = simple(op.reduce_op);
  if (!real || !reduce_op) return std::nullopt;
  return Form{type, per_element, *reduce_op};
}

std::optional<Form> integer(at::ScalarType type, const Op& op, bool ordered = true) {
  const bool orders = op.reduce_op == ReduceOp::min || op.reduce_op == ReduceOp::max;
  const std::optional<c10d::ReduceOp> reduce_op = simple(op.reduce_op);
  if (!reduce_op || (orders && !ordered)) return std::nullopt;
  return Form{type, 1, *reduce_op};
}

std::optional<Form> logical(const Op& op) {
  switch (op.reduce_op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor: return Form{at::kByte, 1, c10d::ReduceOp::MAX};
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band: return Form{at::kByte, 1, c10d::ReduceOp::MIN};
    default: return std::nullopt;
  }
}

std::optional<Form> form_of(const Op& op) {
  if (!op.reduces()) return Form{at::kByte, size_of(op.dtype)};
  switch (op.dtype) {
    case DType::f64: return floating(at::kDouble, op, 1);
    case DType::f32: return floating(at::kFloat, op, 1);
    case DType::f16: return floating(at::kHalf, op, 1);
    case DType::bf16: return floating(at::kBFloat16, op, 1);
    case DType::c64: return floating(at::kFloat, op, 2);
    case DType::c128: return floating(at::kDouble, op, 2);
    case DType::i8: return integer(at::kChar, op);
    case DType::u8: return integer(at::kByte, op);
    case DType::i32: return integer(at::kInt, op);
    case DType::i64: return integer(at::kLong, op);
    case DType::u32: return integer(at::kInt, op, false);
    case DType::u64: return integer(at::kLong, op, false);
    case DType::boolean: return logical(op);
    default: return std::nullopt;
  }
}

class NcclCall {
 public:
  NcclCall(c10d::Backend& backend, const Op& op, c10::Device device)
      : backend_(backend), op_(op), device_(device), form_(form_of(op).value()) {}

  c10::intrusive_ptr<c10d::Work> run() {
    switch (op_.kind) {
      case OpKind::all_reduce: return all_reduce();
      case OpKind::reduce: return reduce();
      case OpKind::broadcast: return broadcast();
      case OpKind::all_gather: return all_gather();
      case OpKind::reduce_scatter: return reduce_scatter();
      case OpKind::all_to_all: return all_to_all();
      case OpKind::gather: return gather();
      case OpKind::scatter: return scatter();
      default: throw std::logic_error("pycomm: no call of NCCL's");
    }
  }

 private:
  at::Tensor flat(const std::byte* data, size_t count) const {
    const auto options = at::TensorOptions().dtype(form_.type).device(device_);
    const auto length = static_cast<int64_t>(count * form_.per_element);
    if (length == 0) return at::empty({0}, options);
    return at::from_blob(const_cast<std::byte*>(data), {length}, {1}, [](void*) {}, options, device_);
  }
  Tensors list(const std::vector<Part>& parts) const {
    Tensors tensors;
    for (const Part& part : parts) tensors.push_back(flat(part.data, part.count));
    return tensors;
  }
  // One tensor for all parts, where they lie one behind the other.
  std::optional<at::Tensor> whole(const std::vector<Part>& parts) const {
    size_t total = 0;
    for (const Part& part : parts) {
      if (part.count && part.data != parts[0].data + total * size_of(op_.dtype)) return std::nullopt;
      total += part.count;
    }
    return flat(parts[0].data, total);
  }
  std::vector<int64_t> lengths(const std::vector<Part>& parts) const {
    std::vector<int64_t> lengths;
    for (const Part& part : parts) lengths.push_back(static_cast<int64_t>(part.count * form_.per_element));
    return lengths;
  }
  // NCCL's calls of this kind are in place.
  Tensors in_place() const {
    at::Tensor out = flat(op_.out, op_.count);
    if (op_.in != op_.out) out.copy_(flat(op_.in, op_.count));
    return {out};
  }

  c10::intrusive_ptr<c10d::Work> all_reduce() {
    c10d::AllreduceOptions options;
    options.reduceOp = form_.reduce_op;
    Tensors tensors = in_place();
    return backend_.allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce() {
    c10d::ReduceOptions options;
    options.reduceOp = form_.reduce_op;
    options.rootRank = op_.root;
    Tensors tensors = op_.out ? in_place() : Tensors{flat(op_.in, op_.count)};
    return backend_.reduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast() {
    c10d::BroadcastOptions options;
    options.rootRank = op_.root;
    Tensors tensors{flat(op_.out ? op_.out : op_.in, op_.count)};
    return backend_.broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> all_gather() {
    at::Tensor in = flat(op_.in, op_.own_count(backend_.getRank()));
    if (auto out = op_.uneven ? std::nullopt : whole(op_.out_parts))
      return backend_._allgather_base(*out, in);
    Lists outputs{list(op_.out_parts)};
    Tensors inputs{in};
    return backend_.allgather(outputs, inputs);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter() {
    c10d::ReduceScatterOptions options;
    options.reduceOp = form_.reduce_op;
    at::Tensor out = flat(op_.out, op_.own_count(backend_.getRank()));
    if (auto in = op_.uneven ? std::nullopt : whole(op_.in_parts))
      return backend_._reduce_scatter_base(out, *in, options);
    Tensors outputs{out};
    Lists inputs{list(op_.in_parts)};
    return backend_.reduce_scatter(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> all_to_all() {
    auto in = whole(op_.in_parts), out = whole(op_.out_parts);
    if (in && out) {
      std::vector<int64_t> sent = lengths(op_.in_parts), received = lengths(op_.out_parts);
      return backend_.alltoall_base(*out, *in, received, sent);
    }
    Tensors inputs = list(op_.in_parts), outputs = list(op_.out_parts);
    return backend_.alltoall(outputs, inputs);
  }
  c10::intrusive_ptr<c10d::Work> gather() {
    c10d::GatherOptions options;
    options.rootRank = op_.root;
    Lists outputs;
    if (backend_.getRank() == op_.root) outputs.push_back(list(op_.out_parts));
    Tensors inputs{flat(op_.in, op_.count)};
    return backend_.gather(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> scatter() {
    c10d::ScatterOptions options;
    options.rootRank = op_.root;
    Lists inputs;
    if (backend_.getRank() == op_.root) inputs.push_back(list(op_.in_parts));
    Tensors outputs{flat(op_.out, op_.count)};
    return backend_.scatter(outputs, inputs, options);
  }

  c10d::Backend& backend_;
  const Op& op_;
  const c10::Device device_;
  const Form form_;
};

}  // namespace

std::string fault_on_nccl(const Op& op) {
  if (form_of(op)) return "";
  return std::string("between hosts CUDA tensors go by NCCL, which has no ") + to_string(op.reduce_op) +
         " of dtype " + to_string(op.dtype) + "; convert the tensor, or reduce a copy on the CPU";
}

c10::intrusive_ptr<c10d::Work> call_nccl(c10d::Backend& backend, const Op& op, c10::Device device) {
  return NcclCall(backend, op, device).run();
}

}  // namespace pycomm
