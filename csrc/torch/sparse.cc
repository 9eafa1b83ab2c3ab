// sparse.cc -- see sparse.h.
#include "sparse.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <stdexcept>

#include "../arithmetic/reduce.h"

namespace pycomm {

namespace {

[[noreturn]] void bad(const Communicator& comm, const std::string& text) {
  throw std::invalid_argument(comm.transport().where({OpKind::all_reduce, 0}) + text);
}

// Words before the sizes.
enum Word { dtype_word, sparse_dims_word, dims_word, nnz_word, num_words };

// What one rank contributes, as its block says it.
class Block {
 public:
  static at::Tensor pack(const at::Tensor& tensor) {
    const at::Tensor indices = tensor._indices().contiguous(), values = tensor._values().contiguous();
    std::vector<int64_t> words = {static_cast<int64_t>(tensor.scalar_type()), tensor.sparse_dim(),
                                  tensor.dim(), tensor._nnz()};
    words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
    const size_t head = words.size() * sizeof(int64_t);
    const at::Tensor block =
        at::empty({static_cast<int64_t>(head + indices.nbytes() + values.nbytes())}, at::kByte);
    auto* to = static_cast<std::byte*>(block.data_ptr());
    std::memcpy(to, words.data(), head);
    if (indices.nbytes()) std::memcpy(to + head, indices.const_data_ptr(), indices.nbytes());
    if (values.nbytes()) std::memcpy(to + head + indices.nbytes(), values.const_data_ptr(), values.nbytes());
    return block;
  }

  explicit Block(const at::Tensor& bytes) : bytes_(bytes) {}

  at::ScalarType dtype() const { return static_cast<at::ScalarType>(word(dtype_word)); }
  int64_t sparse_dims() const { return word(sparse_dims_word); }
  int64_t nnz() const { return word(nnz_word); }
  at::IntArrayRef sizes() const { return {words() + num_words, static_cast<size_t>(word(dims_word))}; }

  // The place of each element when the sparse dimensions are counted through.
  at::Tensor keys() const {
    const int64_t begin = (num_words + word(dims_word)) * 8, nbytes = sparse_dims() * nnz() * 8;
    const at::Tensor indices = bytes_.narrow(0, begin, nbytes).view(at::kLong).view({sparse_dims(), nnz()});
    at::Tensor keys = at::zeros({nnz()}, at::kLong);
    for (int64_t dim = 0; dim < sparse_dims(); ++dim) keys = keys * sizes()[dim] + indices[dim];
    return keys;
  }
  at::Tensor values() const {
    const int64_t begin = (num_words + word(dims_word) + sparse_dims() * nnz()) * 8;
    std::vector<int64_t> shape = sizes().slice(sparse_dims()).vec();
    shape.insert(shape.begin(), nnz());
    at::Tensor values = at::empty(shape, dtype());  // a block need not be aligned for its dtype
    if (values.nbytes())
      std::memcpy(values.data_ptr(), static_cast<const std::byte*>(bytes_.const_data_ptr()) + begin,
                  values.nbytes());
    return values;
  }

  std::string describe() const {
    std::string text = std::string(c10::toString(dtype())) + " [";
    for (size_t dim = 0; dim < sizes().size(); ++dim)
      text += (dim ? ", " : "") + std::to_string(sizes()[dim]);
    return text + "] with " + std::to_string(sparse_dims()) + " sparse dimensions";
  }
  bool alike(const Block& other) const {
    return dtype() == other.dtype() && sparse_dims() == other.sparse_dims() && sizes() == other.sizes();
  }

 private:
  const int64_t* words() const { return static_cast<const int64_t*>(bytes_.const_data_ptr()); }
  int64_t word(Word which) const { return words()[which]; }

  at::Tensor bytes_;
};

at::Tensor sum_of(const std::vector<Block>& blocks) {
  const Block& first = blocks[0];
  Tensors keys;
  for (const Block& block : blocks) keys.push_back(block.keys());
  at::Tensor places, where;  // of the result; where[i]: to which of them goes element i of all
  std::tie(places, where) = at::_unique(at::cat(keys), /*sorted=*/true, /*return_inverse=*/true);
  const bool rounds = first.dtype() == at::kHalf || first.dtype() == at::kBFloat16;
  std::vector<int64_t> shape = first.sizes().slice(first.sparse_dims()).vec();
  shape.insert(shape.begin(), places.numel());
  at::Tensor sum = at::zeros(shape, rounds ? at::kFloat : first.dtype());
  int64_t begin = 0;
  const DType dtype = dtype_of(sum);
  for (const Block& block : blocks) {  // a block has each place once, so this adds in rank order
    const at::Tensor rows = where.narrow(0, begin, block.nnz());
    const at::Tensor so_far = sum.index_select(0, rows),
                     values = block.values().to(sum.scalar_type()).contiguous();
    const void* sources[] = {so_far.const_data_ptr(), values.const_data_ptr()};
    reduce({dtype, ReduceOp::sum}, sources, 2, so_far.data_ptr(), so_far.numel());
    sum.index_copy_(0, rows, so_far);
    begin += block.nnz();
  }
  Tensors indices(first.sparse_dims());
  for (int64_t dim = first.sparse_dims() - 1; dim >= 0; --dim) {
    const int64_t size = std::max<int64_t>(first.sizes()[dim], 1);
    indices[dim] = places.remainder(size);
    places = places.div(size, "floor");
  }
  const at::Tensor all = indices.empty() ? at::zeros({0, sum.size(0)}, at::kLong) : at::stack(indices);
  return at::_sparse_coo_tensor_unsafe(all, sum.to(first.dtype()), first.sizes(),
                                       sum.options().dtype(first.dtype()).layout(at::kSparse))
      ._coalesced_(true);
}

struct Blocks final : Receiver {
  explicit Blocks(int world_size) : bytes(world_size) {}
  std::byte* room(int src, size_t count) override {
    bytes[src] = at::empty({static_cast<int64_t>(count)}, at::kByte);
    return static_cast<std::byte*>(bytes[src].data_ptr());
  }
  Tensors bytes;
};

class SparseAllReduce final : public TensorTask {
 public:
  SparseAllReduce(Communicator& comm, Request request, std::unique_ptr<Blocks> blocks, Tensors targets)
      : TensorTask(comm, std::move(request)), blocks_(std::move(blocks)), targets_(std::move(targets)) {}

 protected:
  void finish(bool patient) override {
    at::AutoDispatchBelowAutograd below_autograd;
    c10::NoGradGuard no_grad;
    TensorTask::finish(patient);
    std::vector<Block> blocks;
    for (const at::Tensor& bytes : blocks_->bytes) blocks.emplace_back(bytes);
    const Block& mine = blocks[comm_.rank()];
    for (int p = 0; p < comm_.world_size(); ++p)
      if (!mine.alike(blocks[p]))
        comm_.raise(ErrorKind::mismatch, {OpKind::all_reduce, sequence()}, p,
                    "sparse tensor of " + mine.describe() + " here, of " + blocks[p].describe() +
                        " on rank " + std::to_string(p) + ". All ranks must pass equal dtypes and sizes.");
    const at::Tensor sum = sum_of(blocks);
    for (at::Tensor& target : targets_) target.copy_(sum);
  }

 private:
  std::unique_ptr<Blocks> blocks_;
  Tensors targets_;
};

}  // namespace

TaskPtr make_sparse_all_reduce(Communicator& comm, const Tensors& tensors, Reduction reduction,
                               const CallOptions& options) {
  if (reduction.op != ReduceOp::sum)
    bad(comm, std::string("sparse tensors are reduced with sum only, not ") + to_string(reduction.op));
  at::AutoDispatchBelowAutograd below_autograd;
  c10::NoGradGuard no_grad;
  at::Tensor own;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.layout() != at::kSparse || !tensor.device().is_cpu())
      bad(comm,
          "sparse tensors must be in COO layout and on the CPU, all of a call; convert others with "
          ".to_sparse_coo(), .cpu() or .to_dense()");
    if (tensor.scalar_type() != tensors[0].scalar_type() || tensor.sizes() != tensors[0].sizes() ||
        tensor.sparse_dim() != tensors[0].sparse_dim())
      bad(comm, "sparse tensors of one call must be alike in dtype, sizes and sparse dimensions");
    own = own.defined() ? own + tensor : tensor;
  }
  if (!reduce_supported(dtype_of(own._values()), ReduceOp::sum))
    bad(comm, std::string("sum is not defined for dtype ") + c10::toString(own.scalar_type()));
  const at::Tensor block = Block::pack(own.coalesce());
  auto blocks = std::make_unique<Blocks>(comm.world_size());
  Request request;
  request.op.kind = OpKind::all_to_all;
  request.op.uneven = true;
  request.op.timeout = options.timeout;
  request.op.receiver = blocks.get();
  request.op.in_parts.assign(comm.world_size(),
                             {static_cast<std::byte*>(block.data_ptr()), static_cast<size_t>(block.numel())});
  request.keep = {block};
  return std::make_shared<SparseAllReduce>(comm, std::move(request), std::move(blocks), tensors);
}

}  // namespace pycomm
