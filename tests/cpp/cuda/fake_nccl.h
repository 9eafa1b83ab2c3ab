// fake_nccl.h -- what takes the place of torch's ProcessGroupNCCL on the fake device: a c10d::Backend whose
// operations run in stream order, over Gloo, on the memory of the tensors, which is the host's.
//
// As NCCL's: an operation begins when the stream that was current has come to it, runs beside it, and a
// stream that waits for it goes on at its end; between startCoalescing() and endCoalescing() nothing starts.
// It knows the types and reductions of NCCL alone. Tests tell it to fail, to hang (until abort()), and read
// what was called.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::cuda {

void bind_fake_nccl(pybind11::module_& module);

}  // namespace pycomm::cuda
