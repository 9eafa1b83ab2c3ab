// key.h -- the name of a kernel.
#pragma once

#include "layout.h"

namespace pycomm::cuda {

// What it does, and for a reduction of which elements and by which operation.
struct KernelKey {
  Kernel kernel;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
};

}  // namespace pycomm::cuda
