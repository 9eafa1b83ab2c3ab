// nccl_calls.h -- one operation of pycomm (op/op.h), on device memory, as a call of torch's ProcessGroupNCCL
// or whatever c10d::Backend takes its place.
//
// What moves data alone goes as bytes, so all dtypes do. Sums go as what NCCL knows:
//
//   here                       there
//   f64 f32 f16 bf16           the same; sum, avg, premul_sum, product, min, max
//   c64 c128                   their real and imaginary parts; sum, avg, premul_sum
//   i8 u8 i32 i64              the same; sum, product, min, max
//   u32 u64                    i32, i64, whose sums and products have the same bits; sum, product
//   bool                       u8, of which all are 0 or 1: sum and bor are max; product and band are min
//
// Everything else is refused, on each rank alone, before anything is sent.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

#include "tensors.h"

namespace pycomm {

// Why NCCL cannot do it; empty: it can.
std::string fault_on_nccl(const Op& op);

// Enqueues behind the current stream, in a stream of NCCL's. Null inside of startCoalescing(). Throws what
// the backend throws.
c10::intrusive_ptr<c10d::Work> call_nccl(c10d::Backend& backend, const Op& op, c10::Device device);

}  // namespace pycomm
