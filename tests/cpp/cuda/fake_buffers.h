// fake_buffers.h -- the device memory that an operation of FakeNccl (fake_nccl.cc) uses, and private memory
// in its place, over which Gloo works. Gloo cannot be aborted: what it does too late never touches a tensor.
// What the device does is read() and write(), which look whether the memory is still there.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <set>
#include <vector>

#include "fake_touch.h"

namespace pycomm::cuda {

class Buffers {
 public:
  at::Tensor in(const at::Tensor& tensor) { return add(tensor, false); }
  at::Tensor out(const at::Tensor& tensor) { return add(tensor, true); }  // read, too
  std::vector<at::Tensor> in(const std::vector<at::Tensor>& tensors) { return add(tensors, false); }
  std::vector<at::Tensor> out(const std::vector<at::Tensor>& tensors) { return add(tensors, true); }

  void read() const {
    for (const Each& each : all_)
      touch(each, [&] { std::memcpy(each.here.data_ptr(), each.device, each.here.nbytes()); });
  }
  void write() const {
    for (const Each& each : all_)
      if (each.out) touch(each, [&] { std::memcpy(each.device, each.here.data_ptr(), each.here.nbytes()); });
  }
  void append(const Buffers& more) { all_.insert(all_.end(), more.all_.begin(), more.all_.end()); }

 private:
  struct Each {
    void* device;
    at::Tensor here;
    bool out;
  };

  at::Tensor add(const at::Tensor& tensor, bool out) {
    TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous(), "Tensors must be CUDA and dense");
    static const std::set<at::ScalarType> known{at::kDouble, at::kFloat, at::kHalf, at::kBFloat16,
                                                at::kChar,   at::kByte,  at::kInt,  at::kLong};
    TORCH_CHECK(known.count(tensor.scalar_type()), "Unconvertible NCCL type ", tensor.scalar_type());
    if (tensor.numel() == 0) return at::empty({0}, tensor.scalar_type());
    const at::Tensor here = at::empty(tensor.sizes(), tensor.scalar_type());
    all_.push_back({tensor.data_ptr(), here, out});
    return here;
  }
  std::vector<at::Tensor> add(const std::vector<at::Tensor>& tensors, bool out) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& tensor : tensors) all.push_back(add(tensor, out));
    return all;
  }
  template <class Access>
  static void touch(const Each& each, const Access& access) {
    if (!fake_touch(reinterpret_cast<DevicePtr>(each.device), each.here.nbytes(), access))
      fake_violation("NCCL uses memory that was given back before the device had passed the operation");
  }

  std::vector<Each> all_;
};

}  // namespace pycomm::cuda
