// tensors.cc -- see tensors.h.
#include "tensors.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <stdexcept>

#include "extent.h"
#include "interpreter.h"

namespace pycomm {

namespace {

constexpr const char* lazy_bit =
    "tensors with a lazy conjugate or negative bit cannot be communicated; call "
    ".resolve_conj().resolve_neg()";

constexpr const char* no_memory = "the tensor has no memory (a FakeTensor has none)";

bool has_memory(const at::Tensor& tensor) { return tensor.numel() == 0 || tensor.storage().data(); }

[[noreturn]] void refuse(const Transport& transport, OpKind kind, const std::string& text) {
  throw std::invalid_argument(transport.where({kind, 0}) + text);
}

// An expanded tensor cannot take a result: several of its elements are one.
void refuse_overlap(const Transport& transport, OpKind kind, const at::Tensor& output) {
  if (output.numel() && at::has_internal_overlap(output) == at::MemOverlap::Yes)
    refuse(transport, kind,
           "elements of the output share memory (it was expanded); pass a tensor of its own, such as "
           ".contiguous() makes");
}

// dtype_of, with the rank and the operation in the error.
DType supported_dtype(const Transport& transport, OpKind kind, const at::Tensor& tensor) {
  try {
    return dtype_of(tensor);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(transport.where({kind, 0}) + error.what());
  }
}

// Lists are as long as the group is large. Most are chunks of one buffer, in order.
bool overlap_each_other(const Tensors& tensors) {
  std::vector<Extent> extents;
  extents.reserve(tensors.size());
  bool ascending = true;
  for (const at::Tensor& tensor : tensors) {
    extents.push_back(Extent::of(tensor));
    const size_t last = extents.size() - 1;
    ascending = ascending && (last == 0 || extents[last - 1].end <= extents[last].begin);
  }
  return !ascending && any_overlap(std::move(extents));
}

// Copies a result into the caller's tensor, in whatever thread: the worker is not in the inference mode in
// which the caller may be.
void copy_back(const at::Tensor& target, const at::Tensor& dense) {
  c10::InferenceMode mode(target.is_inference());
  c10::NoGradGuard no_grad;
  target.copy_(dense);
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

  [[noreturn]] void bad(const std::string& text) const { refuse(comm_.transport(), op.kind, text); }

  std::byte* input(const at::Tensor& tensor) { return hold(tensor, false); }
  std::byte* output(const at::Tensor& tensor) { return hold(tensor, true); }

  // All tensors of a call must agree with the first one.
  void type(const at::Tensor& tensor) {
    if (!tensor.device().is_cpu() && !tensor.device().is_cuda())
      bad("tensor is on device " + tensor.device().str() +
          "; pycomm moves CPU and CUDA tensors. Copy it with .cpu() or .cuda().");
    if (typed_ && tensor.device() != device_)
      bad("tensors of one call lie on different devices: " + device_.str() + " and " + tensor.device().str());
    device_ = tensor.device();
    if (tensor.layout() != at::kStrided) bad("only dense (strided) tensors can be communicated");
    DType dtype = supported_dtype(comm_.transport(), op.kind, tensor);
    if (typed_ && dtype != op.dtype)
      bad(std::string("tensors of one call differ in dtype: ") + to_string(op.dtype) + " and " +
          to_string(dtype));
    op.dtype = dtype;
    typed_ = true;
  }

  std::vector<Part> list(const Tensors& tensors, bool output) {
    if (tensors.size() != static_cast<size_t>(comm_.world_size()))
      bad("got a list of " + std::to_string(tensors.size()) + " tensors for " +
          std::to_string(comm_.world_size()) + " ranks");
    // Results that overlap each other are copied out in the order of the list, so that the last one stays, as
    // on Gloo; the algorithms write them in any order.
    const bool apart = !output || !overlap_each_other(tensors);
    std::vector<Part> parts;
    for (const at::Tensor& tensor : tensors)
      parts.push_back({hold(tensor, output, apart), static_cast<size_t>(tensor.numel())});
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
  std::byte* hold(const at::Tensor& tensor, bool output, bool in_place = true) {
    type(tensor);
    at::Tensor dense = tensor;
    if (!in_place || !tensor.is_contiguous()) {
      if (output) refuse_overlap(comm_.transport(), op.kind, tensor);
      c10::NoGradGuard no_grad;
      dense = in_place ? tensor.contiguous() : tensor.clone(at::MemoryFormat::Contiguous);
      if (output) copy_back_.emplace_back(tensor, dense);
    }
    if (tensor.is_conj() || tensor.is_neg()) bad(lazy_bit);
    if (!has_memory(dense)) bad(no_memory);
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
std::vector<size_t> split_counts(const Builder& builder, const at::Tensor& tensor,
                                 const std::vector<int64_t>& splits, int world_size, const char* name) {
  const int64_t rows = tensor.dim() ? tensor.size(0) : 1;
  if (splits.empty()) {
    if (rows % world_size)
      builder.bad(std::string(name) + " has " + std::to_string(rows) + " rows, which " +
                  std::to_string(world_size) + " ranks do not divide; pass splits");
    return std::vector<size_t>(world_size, tensor.numel() / world_size);
  }
  if (splits.size() != static_cast<size_t>(world_size))
    builder.bad(std::string("got ") + std::to_string(splits.size()) + " " + name + " splits for " +
                std::to_string(world_size) + " ranks");
  int64_t total = 0;
  std::vector<size_t> counts;
  for (int64_t split : splits) {
    if (split < 0) builder.bad(std::string(name) + " splits must not be negative");
    total += split;
    counts.push_back(rows ? static_cast<size_t>(split * (tensor.numel() / rows)) : 0);
  }
  if (total != rows)
    builder.bad(std::string(name) + " splits sum to " + std::to_string(total) + ", the tensor has " +
                std::to_string(rows) + " rows");
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
    default:
      throw std::invalid_argument(std::string("dtype ") + c10::toString(tensor.scalar_type()) +
                                  " is not supported");
  }
}

void let_go(Tensors& keep, CopyBack& copy_back) {
  if (keep.empty() && copy_back.empty()) return;
  const PythonStay stay;  // also where others hold them: these may let go before this thread does
  if (!stay) {  // for ever
    new Tensors(std::move(keep));
    new CopyBack(std::move(copy_back));
  }
  keep.clear();
  copy_back.clear();
}

Kept::~Kept() {
  if (!tensor.defined()) return;
  const PythonStay stay;
  if (stay) tensor.reset();
  else (void)tensor.unsafeReleaseTensorImpl();
}

TensorTask::~TensorTask() { TensorTask::release(); }

void TensorTask::release() { let_go(keep_, copy_back_); }

void TensorTask::finish(bool patient) {
  CollectiveTask::finish(patient);
  for (auto& [target, dense] : copy_back_) copy_back(target, dense);
}

Request make_all_reduce(Communicator& comm, const at::Tensor& in, const at::Tensor& out, Reduction reduction,
                        const CallOptions& options) {
  Builder builder(comm, OpKind::all_reduce, options);
  builder.reduction(reduction);
  if (in.numel() != out.numel())
    builder.bad("out has " + std::to_string(out.numel()) + " elements, expected " +
                std::to_string(in.numel()));
  builder.op.out = builder.output(out);
  builder.op.in = in.is_same(out) ? builder.op.out : builder.input(in);
  builder.op.count = in.numel();
  return builder.build();
}

Request make_reduce(Communicator& comm, const at::Tensor& in, const at::Tensor& out, int root,
                    Reduction reduction, const CallOptions& options) {
  Builder builder(comm, OpKind::reduce, options);
  builder.reduction(reduction);
  builder.op.root = root;
  builder.op.count = in.numel();
  if (comm.rank() == root) {
    if (in.numel() != out.numel())
      builder.bad("out has " + std::to_string(out.numel()) + " elements, expected " +
                  std::to_string(in.numel()));
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

Request make_all_gather(Communicator& comm, const at::Tensor& in, const Tensors& out,
                        const CallOptions& options) {
  Builder builder(comm, OpKind::all_gather, options);
  builder.op.in = builder.input(in);
  builder.op.out_parts = builder.list(out, true);
  builder.op.uneven = !equal_counts(builder.op.out_parts);
  builder.op.count = builder.op.uneven ? total_count(builder.op.out_parts) : in.numel();
  const size_t own = builder.op.out_parts[comm.rank()].count;
  if (own != static_cast<size_t>(in.numel()))
    builder.bad("out[" + std::to_string(comm.rank()) + "] has " + std::to_string(own) +
                " elements, the input of this rank has " + std::to_string(in.numel()));
  return builder.build();
}

Request make_all_gather_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out,
                             const CallOptions& options) {
  Builder builder(comm, OpKind::all_gather, options);
  if (out.numel() != in.numel() * comm.world_size())
    builder.bad("out has " + std::to_string(out.numel()) + " elements, expected world_size * " +
                std::to_string(in.numel()));
  builder.op.in = builder.input(in);
  builder.op.out_parts = builder.cut(builder.output(out), std::vector<size_t>(comm.world_size(), in.numel()));
  builder.op.count = in.numel();
  return builder.build();
}

Request make_reduce_scatter(Communicator& comm, const Tensors& in, const at::Tensor& out, Reduction reduction,
                            const CallOptions& options) {
  Builder builder(comm, OpKind::reduce_scatter, options);
  builder.reduction(reduction);
  builder.op.in_parts = builder.list(in, false);
  builder.op.out = builder.output(out);
  builder.op.uneven = !equal_counts(builder.op.in_parts);
  builder.op.count = builder.op.uneven ? total_count(builder.op.in_parts) : out.numel();
  const size_t own = builder.op.in_parts[comm.rank()].count;
  if (own != static_cast<size_t>(out.numel()))
    builder.bad("out has " + std::to_string(out.numel()) + " elements, in[" + std::to_string(comm.rank()) +
                "] has " + std::to_string(own));
  return builder.build();
}

Request make_reduce_scatter_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out,
                                 Reduction reduction, const CallOptions& options) {
  Builder builder(comm, OpKind::reduce_scatter, options);
  builder.reduction(reduction);
  if (in.numel() != out.numel() * comm.world_size())
    builder.bad("the input has " + std::to_string(in.numel()) + " elements, expected world_size * " +
                std::to_string(out.numel()));
  builder.op.in_parts =
      builder.cut((builder.type(in), builder.input(in)), std::vector<size_t>(comm.world_size(), out.numel()));
  builder.op.out = builder.output(out);
  builder.op.count = out.numel();
  return builder.build();
}

Request make_all_to_all(Communicator& comm, const Tensors& in, const Tensors& out,
                        const CallOptions& options) {
  Builder builder(comm, OpKind::all_to_all, options);
  builder.op.in_parts = builder.list(in, false);
  builder.op.out_parts = builder.list(out, true);
  builder.op.uneven = true;
  return builder.build();
}

Request make_all_to_all_flat(Communicator& comm, const at::Tensor& in, const at::Tensor& out,
                             const Splits& splits, const CallOptions& options) {
  Builder builder(comm, OpKind::all_to_all, options);
  const int n = comm.world_size();
  std::byte* from = builder.input(in);
  std::byte* to = builder.output(out);
  builder.op.uneven = !splits.in.empty() || !splits.out.empty();
  builder.op.in_parts = builder.cut(from, split_counts(builder, in, splits.in, n, "input"));
  builder.op.out_parts = builder.cut(to, split_counts(builder, out, splits.out, n, "output"));
  builder.op.count = builder.op.uneven ? 0 : in.numel() / n;
  return builder.build();
}

Request make_gather(Communicator& comm, const at::Tensor& in, const Tensors& out, int root,
                    const CallOptions& options) {
  Builder builder(comm, OpKind::gather, options);
  builder.op.root = root;
  builder.op.count = in.numel();
  builder.op.in = builder.input(in);
  if (comm.rank() == root) builder.op.out_parts = builder.list(out, true);
  return builder.build();
}

Request make_scatter(Communicator& comm, const Tensors& in, const at::Tensor& out, int root,
                     const CallOptions& options) {
  Builder builder(comm, OpKind::scatter, options);
  builder.op.root = root;
  builder.op.count = out.numel();
  builder.op.out = builder.output(out);
  if (comm.rank() == root) builder.op.in_parts = builder.list(in, false);
  return builder.build();
}

Request make_barrier(Communicator& comm, const CallOptions& options) {
  return Builder(comm, OpKind::barrier, options).build();
}

at::Tensor checked_message(const Transport& transport, OpKind kind, const at::Tensor& tensor,
                           c10::DeviceType device) {
  if (tensor.device().type() != device || tensor.layout() != at::kStrided)
    throw std::invalid_argument(transport.where({kind, 0}) +
                                "pycomm sends and receives dense CPU and CUDA tensors, got one on device " +
                                tensor.device().str());
  if (tensor.is_conj() || tensor.is_neg()) throw std::invalid_argument(transport.where({kind, 0}) + lazy_bit);
  supported_dtype(transport, kind, tensor);
  if (!has_memory(tensor)) refuse(transport, kind, no_memory);
  if (kind == OpKind::recv && !tensor.is_contiguous()) refuse_overlap(transport, kind, tensor);
  return tensor.contiguous();
}

MessageWorkPtr send_tensor(Communicator& comm, const at::Tensor& tensor, const MessageOptions& options) {
  const at::Tensor dense = checked_message(comm.transport(), OpKind::send, tensor, c10::kCPU);
  const MessageSpec spec{dtype_of(dense), static_cast<size_t>(dense.numel()), options.peer, options.tag,
                         options.timeout};
  return messages_of(comm).send(static_cast<const std::byte*>(dense.data_ptr()), spec,
                                [kept = Kept(dense)] {});
}

MessageWorkPtr recv_tensor(Communicator& comm, const at::Tensor& tensor, const MessageOptions& options) {
  const at::Tensor dense = checked_message(comm.transport(), OpKind::recv, tensor, c10::kCPU);
  const MessageSpec spec{dtype_of(dense), static_cast<size_t>(dense.numel()), options.peer, options.tag,
                         options.timeout};
  return messages_of(comm).recv(static_cast<std::byte*>(dense.data_ptr()), spec,
                                [dense = Kept(dense), target = Kept(tensor)] {
                                  if (!dense.tensor.is_same(target.tensor))
                                    copy_back(target.tensor, dense.tensor);
                                });
}

}  // namespace pycomm
