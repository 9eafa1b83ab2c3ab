// slices.h -- pieces of a buffer inside a host: every rank has a slice of it, or all ranks have all of it.
#pragma once

#include "operation.h"

namespace pycomm::across {

// The buffer `data` of every rank of this host is reduced; rank l gets slice l (chunk_of) in `slice`.
inline void reduce_to_slices(Operation& operation, const std::byte* data, size_t count, std::byte* slice) {
  Op step = operation.reduction_inside(OpKind::reduce_scatter);
  step.count = count;
  for (int l = 0; l < operation.locals; ++l) {
    const Range range = chunk_of(count, l, operation.locals, operation.item);
    step.in_parts.push_back({const_cast<std::byte*>(operation.at(data, range.begin)), range.size()});
  }
  step.out = slice;
  operation.inside(std::move(step));
}

// Every rank has its slice of `data` in place and gets the others'.
inline void gather_slices(Operation& operation, std::byte* data, size_t count) {
  Op step;
  step.kind = OpKind::all_gather;
  step.dtype = operation.op.dtype;
  step.uneven = true;
  step.count = count;
  for (int l = 0; l < operation.locals; ++l) {
    const Range range = chunk_of(count, l, operation.locals, operation.item);
    step.out_parts.push_back({operation.at(data, range.begin), range.size()});
  }
  step.in = step.out_parts[operation.local].data;
  operation.inside(std::move(step));
}

}  // namespace pycomm::across
