// fake_torch_module.cc -- what torch calls on CUDA tensors in the variant of pycomm._C for tests, and the
// second Python module in the same file, _fake_cuda, with which tests rule the fake driver. See
// fake_torch_device.h.
//
// Copies and fills run in stream order over the memory of the tensors, which is the host's. All else is
// torch's CPU fallback: it waits for the current stream, computes on copies and copies back.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "../../../csrc/cuda/device/peer_memory.h"
#include "fake_driver.h"
#include "fake_nccl.h"
#include "fake_torch_device.h"

namespace py = pybind11;

namespace pycomm::cuda {

namespace {

constexpr c10::DispatchKeySet cuda_key(c10::DispatchKey::CUDA);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, fake_torch_allocator(), cuda_key, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, fake_torch_allocator(), cuda_key,
                                           c10::dtype_or_default(dtype));
}

// A tensor on the CPU over the same memory; for use in stream order.
struct View {
  explicit View(const at::Tensor& tensor)
      : data(tensor.data_ptr()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}
  at::Tensor on_cpu() const { return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype)); }
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  c10::NoGradGuard no_grad;
  const at::Tensor from = source.expand(self.sizes());
  if (!self.numel()) return self;
  const c10::Device device = self.is_cuda() ? self.device() : from.device();
  const c10::Stream stream = fake_current_stream(device);
  // Of host memory that is not pinned the driver takes a copy at once.
  const at::Tensor staged = from.is_cuda() ? at::Tensor() : from.clone();
  fake_run(stream, [to = View(self), from = View(staged.defined() ? staged : from), staged] {
    c10::NoGradGuard no_grad;
    to.on_cpu().copy_(from.on_cpu());
  });
  if (!self.is_cuda() || (staged.defined() && !non_blocking)) fake_synchronize(stream);
  return self;
}

at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
  if (self.numel())
    fake_run(fake_current_stream(self.device()), [to = View(self), value] {
      c10::NoGradGuard no_grad;
      to.on_cpu().fill_(value);
    });
  return self;
}

at::Tensor& zero_(at::Tensor& self) { return fill_(self, 0); }

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (static_cast<size_t>(impl->numel()) + impl->storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    const c10::DataPtr old = self.storage().set_data_ptr(fake_torch_allocator()->allocate(needed));
    if (const size_t nbytes = self.storage().nbytes())
      fake_torch_allocator()->copy_data(self.storage().mutable_data(), old.get(), nbytes);
    self.storage().set_nbytes(needed);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return const_cast<at::Tensor&>(to).copy_(self);
}

at::Scalar local_scalar(const at::Tensor& self) { return self.cpu().item(); }

void record_stream(at::Tensor& self, at::Stream stream) {
  fake_record_stream(self.storage().data_ptr(), stream);
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

// Without them torch has no device whose streams its autograd engine could respect.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::DeviceIndex deviceCount() const override {
    return c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex current_device() const override {
    return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index();
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("fill_.Scalar", fill_);
  m.impl("zero_", zero_);
  m.impl("resize_", resize_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

// DistributedDataParallel asks for one.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
using c10d::RegistererTimerRegistry;
using c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Timer)

// --- Python ---

c10::Stream stream_of(int64_t id, int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

template <class T>
void set(const py::dict& values, const char* name, T& field) {
  if (values.contains(name)) field = values[name].cast<T>();
}

void use(const py::dict& values) {
  FakeSettings& s = fake_settings();
  set(values, "devices", s.devices);
  set(values, "first_device", s.first_device);
  set(values, "multiprocessors", s.multiprocessors);
  set(values, "mps", s.mps);
  set(values, "stream_memory_operations", s.stream_memory_operations);
  set(values, "ipc", s.ipc);
  set(values, "vmm", s.vmm);
  set(values, "peer_access", s.peer_access);
  set(values, "memory_bytes", s.memory_bytes);
  set(values, "longest_wait", s.longest_wait);
  use_driver(fake_driver());
}

// Also for peers to unmap this process's memory: at most five seconds.
void finish() {
  fake_torch_finish();
  for (int i = 0; i < 500 && PeerMemory::free_parked(); ++i) ::usleep(10000);
}

// Work that holds up a stream until open() is called, or for ten seconds.
class Gate {
 public:
  explicit Gate(int device) {
    fake_run(fake_current_stream(c10::Device(c10::kCUDA, device)), [opened = opened_] {
      for (int i = 0; !*opened && i < 10000; ++i) ::usleep(1000);
    });
  }
  ~Gate() { open(); }
  void open() { *opened_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> opened_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

PYBIND11_MODULE(_fake_cuda, module) {
  module.def("use", &use);
  module.def("new_stream", [](int device) {
    return c10::impl::VirtualGuardImpl(c10::kCUDA)
        .getStreamFromGlobalPool(c10::Device(c10::kCUDA, device), false)
        .id();
  });
  module.def("exchange_stream", [](int64_t id, int device) {
    return c10::impl::VirtualGuardImpl(c10::kCUDA).exchangeStream(stream_of(id, device)).id();
  });
  module.def("current_stream",
             [](int device) { return fake_current_stream(c10::Device(c10::kCUDA, device)).id(); });
  module.def("current_device", [] { return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index(); });
  module.def("set_device", [](int device) {
    c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(c10::Device(c10::kCUDA, device));
  });
  module.def("query", [](int64_t id, int device) {
    return c10::impl::VirtualGuardImpl(c10::kCUDA).queryStream(stream_of(id, device));
  });
  module.def(
      "synchronize", [](int64_t id, int device) { fake_synchronize(stream_of(id, device)); },
      py::call_guard<py::gil_scoped_release>());
  module.def("finish", &finish, py::call_guard<py::gil_scoped_release>());
  module.def("left_over", [] { return fake_counts().total() ? fake_counts().describe() : std::string(); });
  module.def("violations", &fake_violations);
  module.def("calls", &fake_calls);
  module.def("fail", &fake_fail);
  module.def("capture", [](int64_t id, int device, int status, uint64_t capture) {
    fake_capture(static_cast<Stream>(stream_of(id, device).native_handle()), status, capture);
  });
  module.def("bind_fake_nccl", [module] {
    py::module_ here = module;
    bind_fake_nccl(here);
  });
  py::class_<Gate>(module, "Gate").def(py::init<int>()).def("open", &Gate::open);
}

}  // namespace pycomm::cuda
