// tensors.cc -- see tensors.h.
#include "tensors.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <stdexcept>

namespace pycomm {

namespace {

constexpr const char* lazy_bit = "tensors with a lazy conjugate or negative bit cannot be communicated; call .resolve_conj().resolve_neg()";

// dtype_of, with the rank and the operation in the error.
DType supported_dtype(const Transport& transport, OpKind kind, const at::Tensor& tensor) {
  try {
    return dtype_of(tensor);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(transport.where({kind, 0}) + error.what());
  }
}

// Collects what one call needs while its tensors are examined.
class Builder {
 public:
  Builder(Communicator& comm, OpKind kind, const CallOptions& options) : comm_(comm) {
    op.kind = kind;
    op.timeout = options.timeout;
    op.algorithm = options.algorithm;
  }

  Op op;

  [[noreturn]] void bad(const std::string& text) const { throw std::invalid_argument(comm_.transport().where({op.kind, 0}) + text); }

  std::byte* input(const at::Tensor& tensor) { return hold(tensor, false); }
  std::byte* output(const at::Tensor& tensor) { return hold(tensor, true); }

  // All tensors of a call must agree with the first one.
  void type(const at::Tensor& tensor) {
    if (!tensor.device().is_cpu() && !tensor.device().is_cuda())
      bad("tensor is on device " + tensor.device().str() + "; pycomm moves CPU and CUDA tensors. Copy it with .cpu() or .cuda().");
    if (typed_ && tensor.device() != device_)
      bad("tensors of one call lie on different devices: " + device_.str() + " and " + tensor.device().str());
    device_ = tensor.device();
    if (tensor.layout() != at::kStrided) bad("only dense (strided) tensors can be communicated");
    DType dtype = supported_dtype(comm_.transport(), op.kind, tensor);
    if (typed_ && dtype != op.dtype)
      bad(std::string("tensors of one call differ in dtype: ") + to_string(op.dtype) + " and " + to_string(dtype));
    op.dtype = dtype;
    typed_ = true;
  }

  std::vector<Part> list(const Tensors& tensors, bool output) {
    if (tensors.size() != static_cast<size_t>(comm_.world_size()))
      bad("got a list of " + std::to_string(tensors.size()) + " tensors for " + std::to_string(comm_.world_size()) + " ranks");
    std::vector<Part> parts;
    for (const at::Tensor& tensor : tensors) parts.push_back({hold(tensor, output), static_cast<size_t>(tensor.numel())});
    return parts;
  }

  // A contiguous buffer cut into parts of the given numbers of elements.
  std::vector<Part> cut(std::byte* data, const std::vector<size_t>& counts) const {
    std::vector<Part> parts;
    for (size_t count : counts) {
      parts.push_back({data, count});
      data += count * size_of(op.dtype);
    }
    return parts;
  }

  void reduction(Reduction reduction) {
    op.reduce_op = reduction.op;
    op.factor = reduction.factor;
  }

  Request build() { return {std::move(op), device_, std::move(keep_), std::move(copy_back_)}; }

 private:
  std::byte* hold(const at::Tensor& tensor, bool output) {
    type(tensor);
    at::Tensor dense = tensor;
    if (!tensor.is_contiguous()) {
      dense = tensor.contiguous();
      if (output) copy_back_.emplace_back(tensor, dense);
    }
    if (tensor.is_conj() || tensor.is_neg()) bad(lazy_bit);
    keep_.push_back(dense);
    return static_cast<std::byte*>(dense.data_ptr());
  }

  Communicator& comm_;
  bool typed_ = false;
  c10::Device device_ = c10::kCPU;
  Tensors keep_;
  CopyBack copy_back_;
};

bool equal_counts(const std::vector<Part>& parts) {
  for (const Part& part : parts)
    if (part.count != parts[0].count) return false;
  return true;
}

size_t total_count(const std::vector<Part>& parts) {
  size_t total = 0;
  for (const Part& part : parts) total += part.count;
  return total;
}

// Elements per peer from splits in rows.
std::vector<size_t> split_counts(const Builder& builder, const at::Tensor& tensor, const std::vector<int64_t>& splits, int world_size,
                                 const char* name) {
  const int64_t rows = tensor.dim() ? tensor.size(0) : 1;
  if (splits.empty()) {
    if (rows % world_size)
      builder.bad(std::string(name) + " has " + std::to_string(rows) + " rows, which " + std::to_string(world_size) +
                  " ranks do not divide; pass splits");
    return std::vector<size_t>(world_size, tensor.numel() / world_size);
  }
  if (splits.size() != static_cast<size_t>(world_size))
    builder.bad(std::string("got ") + std::to_string(splits.size()) + " " + name + " splits for " + std::to_string(world_size) + " ranks");
  int64_t total = 0;
  std::vector<size_t> counts;
  for (int64_t split : splits) {
    if (split < 0) builder.bad(std::string(name) + " splits must not be negative");
    total += split;
    counts.push_back(rows ? static_cast<size_t>(split * (tensor.numel() / rows)) : 0);
  }
  if (total != rows)
    builder.bad(std::string(name) + " splits sum to " + std::to_string(total) + ", the tensor has " + std::to_string(rows) + " rows");
  return counts;
}

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return DType::f64;
    case at::kFloat: return DType::f32;
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kChar: return DType::i8;
    case at::kByte: return DType::u8;
    case at::kShort: return DType::i16;
    case at::kUInt16: return DType::u16;
    case at::kInt: return DType::i32;
    case at::kUInt32: return DType::u32;
    case at::kLong: return DType::i64;
    case at::kUInt64: return DType::u64;
    case at::kBool: return DType::boolean;
    case at::kComplexFloat: return DType::c64;
    case at::kComplexDouble: return DType::c128;
    case at::kFloat8_e4m3fn: return DType::f8_e4m3fn;
    case at::kFloat8_e5m2: return DType::f8_e5m2;
    case at::kFloat8_e4m3fnuz: return DType::f8_e4m3fnuz;
    case at::kFloat8_e5m2fnuz: return DType::f8_e5m2fnuz;
    case at::kFloat8_e8m0fnu: return DType::f8_e8m0fnu;
    default: throw std::invalid_argument(std::string("dtype ") + c10::toString(tensor.scalar_type()) + " is not supported");
  }
}

void TensorTask::finish(bool patient) {
  CollectiveTask::finish(patient);
  if (copy_back_.empty()) return;
  c10::NoGradGuard no_grad;
  for (auto& [target, dense] : copy_back_) target.copy_(dense);
}

Request make_all_reduce(Communicator& comm, const at::Tensor& in, const at::Tensor& out, Reduction reduction, const CallOptions& options) {
  Builder builder(comm, OpKind::all_reduce, options);
  builder.reduction(reduction);
  if (in.numel() != out.numel())
    builder.bad("out has " + std::to_string(out.numel()) + " elements, expected " + std::to_string(in.numel()));
  builder.op.out = builder.output(out);
  builder.op.in = in.is_same(out) ? builder.op.out : builder.input(in);
  builder.op.count = in.numel();
  return builder.build();
}

Request make_reduce(Communicator& comm, const at::Tensor& in, const at::Tensor& out, int root, Reduction reduction,
                    const CallOptions& options) {
  Builder builder(comm, OpKind::reduce, options);
  builder.reduction(reduction);
  builder.op.root = root;
  builder.op.count = in.numel();
  if (comm.rank() == root) {
    if (in.numel() != out.numel())
      builder.bad("out has " + std::to_string(out.numel()) + " elements, expected " + std::to_string(in.numel()));
    builder.op.out = builder.output(out);
    builder.op.in = in.is_same(out) ? builder.op.out : builder.input(in);
  } else {
    builder.op.in = builder.input(in);
  }
  return builder.build();
}

Request make_broadcast(Communicator& comm, const at::Tensor& tensor, int root, const CallOptions& options) {
  Builder builder(comm, OpKind::broadcast, options);
  builder.op.root = root;
  builder.op.count = tensor.numel();
  if (comm.rank() == root) builder.op.in = builder.input(tensor);
  else builder.op.out = builder.output(tensor);
  return builder.build();
}

Request make_all_gather(Communicator& comm, const at::Tensor& in, const Tensors& out, const CallOptions& options) {
  Builder builder(comm, OpKind::all_gather, options);
  builder.op.in = builder.input(in);
  builder.op.out_parts = builder.list(out, true);
  builder.op.uneven = !equal_counts(builder.op.out_parts);
  builder.op.count = builder.op.uneven ? total_count(builder.op.out_parts) : in.numel();
  const size_t own = builder.op.out_parts[comm.rank()].count;
  if (own != static_cast<size_t>(in.numel()))
    builder.bad("out[" + std::to_string(comm.rank()) + "] has " + std::to_string(own) + " elements, the input of this rank has " +
                std::to_string(in.numel()));
  return builder.build();
}

Request make_all_gather_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out, const CallOptions& options) {
  Builder builder(comm, OpKind::all_gather, options);
  if (out.numel() != in.numel() * comm.world_size())
    builder.bad("out has " + std::to_string(out.numel()) + " elements, expected world_size * " + std::to_string(in.numel()));
  builder.op.in = builder.input(in);
  builder.op.out_parts = builder.cut(builder.output(out), std::vector<size_t>(comm.world_size(), in.numel()));
  builder.op.count = in.numel();
  return builder.build();
}

Request make_reduce_scatter(Communicator& comm, const Tensors& in, const at::Tensor& out, Reduction reduction, const CallOptions& options) {
  Builder builder(comm, OpKind::reduce_scatter, options);
  builder.reduction(reduction);
  builder.op.in_parts = builder.list(in, false);
  builder.op.out = builder.output(out);
  builder.op.uneven = !equal_counts(builder.op.in_parts);
  builder.op.count = builder.op.uneven ? total_count(builder.op.in_parts) : out.numel();
  const size_t own = builder.op.in_parts[comm.rank()].count;
  if (own != static_cast<size_t>(out.numel()))
    builder.bad("out has " + std::to_string(out.numel()) + " elements, in[" + std::to_string(comm.rank()) + "] has " + std::to_string(own));
  return builder.build();
}

Request make_reduce_scatter_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out, Reduction reduction,
                                 const CallOptions& options) {
  Builder builder(comm, OpKind::reduce_scatter, options);
  builder.reduction(reduction);
  if (in.numel() != out.numel() * comm.world_size())
    builder.bad("the input has " + std::to_string(in.numel()) + " elements, expected world_size * " + std::to_string(out.numel()));
  builder.op.in_parts = builder.cut((builder.type(in), builder.input(in)), std::vector<size_t>(comm.world_size(), out.numel()));
  builder.op.out = builder.output(out);
  builder.op.count = out.numel();
  return builder.build();
}

Request make_all_to_all(Communicator& comm, const Tensors& in, const Tensors& out, const CallOptions& options) {
  Builder builder(comm, OpKind::all_to_all, options);
  builder.op.in_parts = builder.list(in, false);
  builder.op.out_parts = builder.list(out, true);
  builder.op.uneven = true;
  return builder.build();
}

Request make_all_to_all_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out, const std::vector<int64_t>& in_splits,
                             const std::vector<int64_t>& out_splits, const CallOptions& options) {
  Builder builder(comm, OpKind::all_to_all, options);
  const int n = comm.world_size();
  std::byte* from = builder.input(in);
  std::byte* to = builder.output(out);
  builder.op.uneven = !in_splits.empty() || !out_splits.empty();
  builder.op.in_parts = builder.cut(from, split_counts(builder, in, in_splits, n, "input"));
  builder.op.out_parts = builder.cut(to, split_counts(builder, out, out_splits, n, "output"));
  builder.op.count = builder.op.uneven ? 0 : in.numel() / n;
  return builder.build();
}

Request make_gather(Communicator& comm, const at::Tensor& in, const Tensors& out, int root, const CallOptions& options) {
  Builder builder(comm, OpKind::gather, options);
  builder.op.root = root;
  builder.op.count = in.numel();
  builder.op.in = builder.input(in);
  if (comm.rank() == root) builder.op.out_parts = builder.list(out, true);
  return builder.build();
}

Request make_scatter(Communicator& comm, const Tensors& in, const at::Tensor& out, int root, const CallOptions& options) {
  Builder builder(comm, OpKind::scatter, options);
  builder.op.root = root;
  builder.op.count = out.numel();
  builder.op.out = builder.output(out);
  if (comm.rank() == root) builder.op.in_parts = builder.list(in, false);
  return builder.build();
}

Request make_barrier(Communicator& comm, const CallOptions& options) { return Builder(comm, OpKind::barrier, options).build(); }

at::Tensor checked_message(const Transport& transport, OpKind kind, const at::Tensor& tensor, c10::DeviceType device) {
  if (tensor.device().type() != device || tensor.layout() != at::kStrided)
    throw std::invalid_argument(transport.where({kind, 0}) + "pycomm sends and receives dense CPU and CUDA tensors, got one on device " +
                                tensor.device().str());
  if (tensor.is_conj() || tensor.is_neg()) throw std::invalid_argument(transport.where({kind, 0}) + lazy_bit);
  supported_dtype(transport, kind, tensor);
  return tensor.contiguous();
}

MessagePtr send_tensor(PointToPoint& engine, const at::Tensor& tensor, int dst, int tag, double timeout) {
  at::Tensor dense = checked_message(engine.transport(), OpKind::send, tensor, c10::kCPU);
  return engine.send(static_cast<const std::byte*>(dense.data_ptr()), dense.numel(), dtype_of(dense), dst, tag, timeout, [dense] {});
}

MessagePtr recv_tensor(PointToPoint& engine, const at::Tensor& tensor, int src, int tag, double timeout) {
  at::Tensor dense = checked_message(engine.transport(), OpKind::recv, tensor, c10::kCPU);
  return engine.recv(static_cast<std::byte*>(dense.data_ptr()), dense.numel(), dtype_of(dense), src, tag, timeout, [dense, tensor] {
    if (dense.is_same(tensor)) return;
    c10::NoGradGuard no_grad;
    tensor.copy_(dense);
  });
}

}  // namespace pycomm
