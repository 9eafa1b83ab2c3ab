// sparse.h -- all_reduce of sparse (COO) tensors on the CPU: what DDP needs for nn.Embedding(sparse=True).
//
// Which elements a rank has, and how many, only that rank knows. So every rank sends its indices and values,
// as one block of bytes, to all others; the sizes come with the headers (Receiver in op/op.h), and it is one
// operation of the group. Then every rank adds the blocks in rank order:
//
//   block of a rank   dtype | sparse dims | dims | nnz | size of each dim | indices, dim by dim | values
//
// All ranks do the same arithmetic in the same order, so they have the same bits. 16-bit floats are added in
// fp32 and rounded once. Cost: every rank receives the blocks of all. What lost: sizes first, in an operation
// of their own. It costs a second round, and after a mismatch in the first the ranks' counts of operations
// differ.
#pragma once

#include <memory>

#include "tensors.h"

namespace pycomm {

// One operation for all of this rank's tensors: they are added to each other, too, and all become the sum.
// Throws std::invalid_argument as the make_* functions do. The inputs are taken when it is made.
TaskPtr make_sparse_all_reduce(Communicator& comm, const Tensors& tensors, Reduction reduction,
                               const CallOptions& options);

}  // namespace pycomm
