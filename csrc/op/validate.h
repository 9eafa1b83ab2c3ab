// validate.h -- what one rank can say of a call by itself: whether it is well formed, and which of its
// buffers overlap.
#pragma once

#include <string>

#include "op.h"

namespace pycomm {

// What is wrong with op on this rank alone, whatever memory its buffers are in; empty: nothing. Whether there
// is such an algorithm, the CPU and the device know themselves.
std::string fault_of(const Op& op, int world_size);

// Which inputs overlap outputs in a way that the algorithms do not allow, so that they need copies.
// Allowed as they are: out == in (all_reduce, reduce, broadcast), the own part of a list == the single
// buffer.
struct Overlap {
  bool single = false;  // op.in
  bool parts = false;   // op.in_parts
};
Overlap find_overlap(const Op& op, int rank);

}  // namespace pycomm
