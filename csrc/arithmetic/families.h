// families.h -- which element types are reduced alike. The kernels of the CPU and of the device are chosen by
// it, so that both reduce the same types in the same way.
#pragma once

#include "../types.h"

namespace pycomm {

enum class Family { floating, integer, boolean, complex, opaque };

inline Family family_of(DType dtype) {
  if (dtype <= DType::bf16) return Family::floating;
  if (dtype <= DType::u64) return Family::integer;
  if (dtype == DType::boolean) return Family::boolean;
  return dtype <= DType::c128 ? Family::complex : Family::opaque;
}

inline bool is_bitwise(ReduceOp op) { return op >= ReduceOp::band; }

// Wrapping sums and products do not see the sign.
inline DType unsigned_of(DType dtype) {
  constexpr DType by_size[] = {DType::u8, DType::u8, DType::u16, DType::u8, DType::u32,
                               DType::u8, DType::u8, DType::u8,  DType::u64};
  return by_size[size_of(dtype)];
}

// On bool.
inline ReduceOp logical_of(ReduceOp op) {
  if (op == ReduceOp::sum || op == ReduceOp::max) return ReduceOp::bor;
  if (op == ReduceOp::product || op == ReduceOp::min) return ReduceOp::band;
  return op;
}

}  // namespace pycomm
