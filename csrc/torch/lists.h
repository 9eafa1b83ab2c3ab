// lists.h -- calls on several tensors at once: coalesced ones (an operation per tensor), and c10d's several
// tensors of one rank (one operation for all).
//
// [Note: inputs are taken first] Gloo copies all inputs of a coalesced call into one flat tensor, works on
// that, and copies the results out in the order of the list. So a tensor that is listed twice (the gradient
// of a tied parameter), or that overlaps another, is reduced once. We run an operation per tensor, in place
// and one after the other; there an input would be read after another operation wrote to it. So inputs that
// overlap the outputs of other operations are copied before the first one starts, and where outputs overlap
// each other, the results are copied out in the order of the list. Without overlap nothing is copied.
#pragma once

#include <vector>

#include "tensors.h"

namespace pycomm {

using Lists = std::vector<Tensors>;

std::vector<Request> make_all_reduce_coalesced(Communicator& comm, const Tensors& tensors,
                                               Reduction reduction, const CallOptions& options);
// outputs[rank][i] is input i of that rank.
std::vector<Request> make_all_gather_coalesced(Communicator& comm, const Tensors& inputs,
                                               const Lists& outputs, const CallOptions& options);
std::vector<Request> make_all_gather_flat_coalesced(Communicator& comm, const Tensors& inputs,
                                                    const Tensors& outputs, const CallOptions& options);
std::vector<Request> make_reduce_scatter_flat_coalesced(Communicator& comm, const Tensors& inputs,
                                                        const Tensors& outputs, Reduction reduction,
                                                        const CallOptions& options);

// Several tensors of one rank, all of one size, dtype and device; on the CPU.
// Every tensor becomes the reduction of all tensors of all ranks.
Request make_all_reduce_several(Communicator& comm, const Tensors& tensors, Reduction reduction,
                                const CallOptions& options);
// Each of the lists gets the inputs of rank 0, then those of rank 1, ...
Request make_all_gather_several(Communicator& comm, const Tensors& inputs, const Lists& outputs,
                                const CallOptions& options);
// Every tensor becomes tensors[root_tensor] of the root.
Request make_broadcast_several(Communicator& comm, const Tensors& tensors, int root, int root_tensor,
                               const CallOptions& options);

}  // namespace pycomm
