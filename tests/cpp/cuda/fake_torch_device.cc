// fake_torch_device.cc -- the guard, the streams and the memory; see fake_torch_device.h.
#include "fake_torch_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "fake_driver.h"

namespace pycomm::cuda {

namespace {

constexpr int max_devices = 8, pool_size = 16;

// Of one process: a forked child has none of its parent's streams and memory.
struct Shared {
  pid_t pid = 0;
  std::mutex mutex;
  std::map<std::pair<int, bool>, std::vector<Stream>> pools;  // (device, high priority)
  std::map<std::pair<int, bool>, size_t> next;
  std::set<Stream> alive;
};

Shared& shared() {
  static std::mutex mutex;
  // A former one is left alone: a thread that did not come along may hold its mutex.
  static Shared* now = nullptr;
  std::lock_guard lock(mutex);
  if (!now || now->pid != ::getpid()) {
    now = new Shared;
    now->pid = ::getpid();
  }
  return *now;
}

struct InThread {
  pid_t pid = 0;
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, max_devices> streams{};
};

InThread& in_thread() {
  thread_local InThread state;
  if (state.pid != ::getpid()) {
    state = {};
    state.pid = ::getpid();
  }
  return state;
}

c10::Device cuda_device(c10::DeviceIndex index) {
  return {c10::kCUDA, index < 0 ? in_thread().device : index};
}
Stream native(const c10::Stream& stream) { return reinterpret_cast<Stream>(stream.id()); }
c10::Stream as_torch(Stream stream, c10::Device device) {
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(stream));
}

Stream make_stream(int device, bool high_priority) {
  ContextGuard guard(static_cast<Device>(device));
  Stream stream = nullptr;
  PYCOMM_CUDA_CHECK(require_driver(), cuStreamCreateWithPriority, &stream, 1, high_priority ? -1 : 0);
  return stream;
}

Stream from_pool(int device, bool high_priority) {
  Shared& state = shared();
  std::lock_guard lock(state.mutex);
  auto& pool = state.pools[{device, high_priority}];
  const size_t index = state.next[{device, high_priority}]++ % pool_size;
  if (index == pool.size()) {
    pool.push_back(make_stream(device, high_priority));
    state.alive.insert(pool.back());
  }
  return pool[index];
}

// --- memory ---

struct Block {
  pid_t pid;
  DevicePtr address;
  size_t nbytes;
  int device;
  Stream stream;
  std::set<Stream> used_in;
};

void order_behind(Stream stream, Stream other) {
  Event event = nullptr;
  PYCOMM_CUDA_CHECK(require_driver(), cuEventCreate, &event, flag::event_disable_timing);
  PYCOMM_CUDA_CHECK(require_driver(), cuEventRecord, event, other);
  PYCOMM_CUDA_CHECK(require_driver(), cuStreamWaitEvent, stream, event, 0);
  require_driver().cuEventDestroy(event);
}

void give_back(const Block& block) {
  std::memset(reinterpret_cast<void*>(block.address), 0xdd, block.nbytes);
  fake_free(block.address);  // torch's allocator keeps what is given back
}

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (block->pid != ::getpid()) return;  // the parent's
  bool ordered;
  {
    std::lock_guard lock(shared().mutex);
    ordered = !block->stream || shared().alive.count(block->stream);
  }
  if (!ordered) return give_back(*block);
  ContextGuard guard(block->device);
  for (Stream stream : block->used_in) order_behind(block->stream, stream);
  fake_enqueue(block->stream, [block = *block] { give_back(block); });
}

class TorchAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device = cuda_device(-1);
    if (!nbytes) return {nullptr, device};
    ContextGuard guard(device.index());
    DevicePtr address = 0;
    PYCOMM_CUDA_CHECK(require_driver(), cuMemAlloc, &address, nbytes);
    auto* block =
        new Block{::getpid(), address, nbytes, device.index(), native(fake_current_stream(device)), {}};
    return {reinterpret_cast<void*>(address), block, &release, device};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    fake_run(fake_current_stream(cuda_device(-1)), [=] { std::memmove(to, from, nbytes); });
  }
};

// --- the guard ---

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return cuda_device(-1); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < deviceCount(), "invalid device ordinal ",
                device.index());
    in_thread().device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { in_thread().device = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return fake_current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_torch(nullptr, cuda_device(device.index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    device = cuda_device(device.index());
    return as_torch(from_pool(device.index(), high_priority), device);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = fake_current_stream(stream.device());
    in_thread().streams.at(stream.device_index()) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native(stream); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return driver() == fake_driver() ? static_cast<c10::DeviceIndex>(fake_settings().devices) : 0;
  }
  bool queryStream(const c10::Stream& stream) const override {
    ContextGuard guard(stream.device_index());
    return require_driver().cuStreamQuery(native(stream)) == result::success;
  }
  void synchronizeStream(const c10::Stream& stream) const override { fake_synchronize(stream); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    fake_record_stream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    ContextGuard guard(stream.device_index());
    Event made = static_cast<Event>(*event);
    if (!made) PYCOMM_CUDA_CHECK(require_driver(), cuEventCreate, &made, flag::event_disable_timing);
    *event = made;
    PYCOMM_CUDA_CHECK(require_driver(), cuEventRecord, made, native(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    ContextGuard guard(stream.device_index());
    PYCOMM_CUDA_CHECK(require_driver(), cuStreamWaitEvent, native(stream), static_cast<Event>(event), 0);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    const int answer = require_driver().cuEventQuery(static_cast<Event>(event));
    TORCH_CHECK(answer == result::success || answer == result::not_ready, "CUDA error: ", answer);
    return answer == result::success;
  }
  void synchronizeEvent(void* event) const override {
    if (event) PYCOMM_CUDA_CHECK(require_driver(), cuEventSynchronize, static_cast<Event>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) require_driver().cuEventDestroy(static_cast<Event>(event));
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

c10::Allocator* fake_torch_allocator() {
  static TorchAllocator allocator;
  return &allocator;
}

c10::Stream fake_current_stream(c10::Device device) {
  device = cuda_device(device.index());
  return c10::Stream(c10::Stream::UNSAFE, device, in_thread().streams.at(device.index()));
}

void fake_synchronize(const c10::Stream& stream) {
  ContextGuard guard(stream.device_index());
  PYCOMM_CUDA_CHECK(require_driver(), cuStreamSynchronize, native(stream));
}

void fake_run(const c10::Stream& stream, std::function<void()> body) {
  fake_enqueue(native(stream), std::move(body));
}

void fake_record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get_deleter() != &release) return;  // memory of somebody else
  auto* block = static_cast<Block*>(data.get_context());
  std::lock_guard lock(shared().mutex);
  if (native(stream) != block->stream) block->used_in.insert(native(stream));
}

void fake_torch_finish() {
  Shared& state = shared();
  for (int device = 0; device < fake_settings().devices; ++device) {
    ContextGuard guard(device);
    std::set<Stream> streams;
    {
      std::lock_guard lock(state.mutex);
      streams = state.alive;
    }
    // Twice: giving memory back in one stream may wait for another.
    for (int round = 0; round < 2; ++round) {
      PYCOMM_CUDA_CHECK(require_driver(), cuStreamSynchronize, nullptr);
      for (Stream stream : streams) PYCOMM_CUDA_CHECK(require_driver(), cuStreamSynchronize, stream);
    }
  }
  std::lock_guard lock(state.mutex);
  for (Stream stream : state.alive) require_driver().cuStreamDestroy(stream);
  state.alive.clear();
  state.pools.clear();
  state.next.clear();
  in_thread().streams.fill(0);
}

}  // namespace pycomm::cuda
