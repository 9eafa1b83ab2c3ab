// fake_torch_device.h -- torch's CUDA device over the fake driver: for a torch without CUDA, in the variant
// of pycomm._C for tests (tests/fake_cuda.py). Only that module may have it: it registers itself with c10
// when it is loaded.
//
// As in torch: a current device and a current stream per device in each thread; stream 0 is the default one,
// other ids are handles of the driver; streams come from a pool and stay. Memory is given back in the order
// of the stream that it was allocated in, and of those that record_stream named, with its content spoilt:
// what reads it too late computes wrong values.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <functional>

namespace pycomm::cuda {

c10::Allocator* fake_torch_allocator();
c10::Stream fake_current_stream(c10::Device device);
void fake_synchronize(const c10::Stream& stream);
void fake_run(const c10::Stream& stream, std::function<void()> body);  // in stream order
// Says that the memory of a tensor is used in a stream other than the one it was allocated in.
void fake_record_stream(const c10::DataPtr& data, const c10::Stream& stream);
// Waits for all streams and destroys them; what was allocated must have been given back.
void fake_torch_finish();

}  // namespace pycomm::cuda
