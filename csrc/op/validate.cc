// validate.cc -- see validate.h.
#include "validate.h"

#include "../arithmetic/reduce.h"

namespace pycomm {

namespace {

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return a_bytes && b_bytes && x < y + b_bytes && y < x + a_bytes;
}

}  // namespace

std::string fault_of(const Op& op, int world_size) {
  if (op.root < 0 || op.root >= world_size)
    return "root=" + std::to_string(op.root) + " is not in [0, " + std::to_string(world_size) + ")";
  if (op.reduces() && !reduce_supported(op.dtype, op.reduce_op))
    return std::string("reduce op ") + to_string(op.reduce_op) + " is not defined for dtype " +
           to_string(op.dtype);
  for (const auto* parts : {&op.in_parts, &op.out_parts}) {
    if (!parts->empty() && parts->size() != static_cast<size_t>(world_size))
      return "got a list of " + std::to_string(parts->size()) + " buffers for " + std::to_string(world_size) +
             " ranks";
    for (size_t p = 0; !op.uneven && p < parts->size(); ++p)
      if ((*parts)[p].count != op.count)
        return "buffer " + std::to_string(p) + " of the list has " + std::to_string((*parts)[p].count) +
               " elements, expected " + std::to_string(op.count);
  }
  return "";
}

Overlap find_overlap(const Op& op, int rank) {
  const size_t item = size_of(op.dtype);
  const size_t own = op.own_count(rank) * item;
  Overlap found;
  if (op.in && op.out) found.single = op.in != op.out && overlap(op.in, own, op.out, own);
  for (size_t p = 0; op.in && p < op.out_parts.size(); ++p) {
    const Part& part = op.out_parts[p];
    if (overlap(op.in, own, part.data, part.count * item) &&
        !(static_cast<int>(p) == rank && op.in == part.data))
      found.single = true;
  }
  for (size_t p = 0; p < op.in_parts.size(); ++p) {
    const Part& part = op.in_parts[p];
    if (op.out && overlap(op.out, own, part.data, part.count * item) &&
        !(static_cast<int>(p) == rank && op.out == part.data))
      found.parts = true;
    for (const Part& target : op.out_parts)
      if (overlap(target.data, target.count * item, part.data, part.count * item)) found.parts = true;
  }
  return found;
}

}  // namespace pycomm
