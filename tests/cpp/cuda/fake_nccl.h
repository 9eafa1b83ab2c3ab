// fake_nccl.h -- what takes the place of torch's ProcessGroupNCCL on the fake device: a c10d::Backend whose
// operations run in stream order, over Gloo, on the memory of the tensors, which is the host's.
//
// As NCCL's: an operation begins when the stream that was current has come to it, runs beside it, and a
// stream that waits for it goes on at its end; between startCoalescing() and endCoalescing() nothing starts.
// It knows the types and reductions of NCCL alone. Tests tell it to fail, to hang (until abort()), and read
// what was called.
//
// Ends are as there, too. An error is an end for the host alone: the device stays in the operation until
// abort(), and after it if the test says so. These are violations (fake_violations()), not undefined
// behaviour: memory given back while the device is in it; two threads in a communicator; abort() while a
// thread is in a call from which it would come back; any call after abort() or shutdown().
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::cuda {

void bind_fake_nccl(pybind11::module_& module);

}  // namespace pycomm::cuda
