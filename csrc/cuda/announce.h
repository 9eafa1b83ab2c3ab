// announce.h -- what ranks tell each other about a call, packed into Announcement::meta, and how a difference
// reads.
#pragma once

#include <string>

#include "../op/op.h"
#include "kernels/layout.h"

namespace pycomm::cuda {

// Every field is compared by the kernels, as one word.
struct Meta {
  OpKind kind = OpKind::none;
  DType dtype = DType::u8;
  ReduceOp reduce_op = ReduceOp::sum;
  Kernel kernel = Kernel::open;
  int root = 0;
  int blocks = 1;
  bool direct = false;  // all buffers of the call lie in registered memory
  bool uneven = false;

  uint64_t pack() const;
  static Meta unpack(uint64_t word);
};

// "count=1024 here, 512 on rank 3. All ranks must pass equal sizes."
std::string describe_difference(const Announcement& here, const Announcement& there, int peer);

}  // namespace pycomm::cuda
