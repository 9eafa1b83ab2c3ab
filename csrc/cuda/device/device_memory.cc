// device_memory.cc -- see device_memory.h.
#include "device_memory.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "spare.h"

namespace pycomm::cuda {

namespace {

size_t round_to(size_t nbytes, size_t multiple) {
  return (std::max<size_t>(nbytes, 1) + multiple - 1) / multiple * multiple;
}

MemAllocationProp exportable(Device device) {
  MemAllocationProp prop{};
  prop.type = flag::allocation_pinned;
  prop.handle_types = flag::handle_posix_fd;
  prop.location = {flag::location_device, device};
  return prop;
}

MulticastProp multicast_prop(size_t nbytes, int num_devices) {
  return {static_cast<unsigned int>(num_devices), nbytes, flag::handle_posix_fd, 0};
}

// A stream that waits for no other: the caller's threads may capture or be busy on theirs.
class OwnStream {
 public:
  explicit OwnStream(const Driver& table) : table_(table) {
    PYCOMM_CUDA_CHECK(table_, cuStreamCreateWithPriority, &stream_, flag::stream_non_blocking, 0);
  }
  ~OwnStream() { table_.cuStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  operator Stream() const { return stream_; }

 private:
  const Driver& table_;
  Stream stream_ = nullptr;
};

}  // namespace

DeviceMemory::DeviceMemory(Kind kind, Device device, size_t nbytes)
    : kind_(kind), device_(device), pid_(::getpid()), driver_(&require_driver()), nbytes_(nbytes) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  if (this != &other) {
    release();
    swap(other);
  }
  return *this;
}

void DeviceMemory::swap(DeviceMemory& other) noexcept {
  std::swap(kind_, other.kind_);
  std::swap(device_, other.device_);
  std::swap(pid_, other.pid_);
  std::swap(driver_, other.driver_);
  std::swap(address_, other.address_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(handle_, other.handle_);
  std::swap(has_handle_, other.has_handle_);
  std::swap(reserved_, other.reserved_);
  std::swap(mapped_, other.mapped_);
  std::swap(bound_, other.bound_);
}

bool DeviceMemory::from_this_process() const { return pid_ == ::getpid(); }

void DeviceMemory::release() noexcept {
  if (kind_ != Kind::none && from_this_process()) try {
      ContextGuard guard(device_);
      if (kind_ == Kind::allocated && address_) free_block(device_, address_, nbytes_);
      if (kind_ == Kind::opened && address_) driver_->cuIpcCloseMemHandle(address_);
      if (mapped_) driver_->cuMemUnmap(address_, nbytes_);
      if (reserved_) driver_->cuMemAddressFree(address_, nbytes_);
      if (bound_) driver_->cuMulticastUnbind(handle_, device_, 0, nbytes_);
      if (has_handle_) driver_->cuMemRelease(handle_);
    } catch (const std::exception&) {
      // The driver is gone or broken, and the memory with it.
    }
  kind_ = Kind::none;
  address_ = handle_ = nbytes_ = 0;
  has_handle_ = reserved_ = mapped_ = bound_ = false;
}

DeviceMemory DeviceMemory::allocate(Device device, size_t nbytes) {
  DeviceMemory memory(Kind::allocated, device, round_to(nbytes, block_alignment));
  memory.address_ = allocate_block(device, memory.nbytes_);
  return memory;
}

DeviceMemory DeviceMemory::open(Device device, const IpcHandle& handle) {
  DeviceMemory memory(Kind::opened, device, 0);
  ContextGuard guard(device);
  PYCOMM_CUDA_CHECK(*memory.driver_, cuIpcOpenMemHandle, &memory.address_, handle,
                    flag::ipc_lazy_peer_access);
  return memory;
}

DeviceMemory DeviceMemory::create(Device device, size_t nbytes, size_t multiple,
                                  const std::vector<Device>& readers) {
  const MemAllocationProp prop = exportable(device);
  size_t granularity = 0;
  PYCOMM_CUDA_CHECK(require_driver(), cuMemGetAllocationGranularity, &granularity, &prop,
                    flag::granularity_recommended);
  DeviceMemory memory(Kind::virtual_memory, device,
                      round_to(nbytes, std::max({granularity, multiple, block_alignment})));
  ContextGuard guard(device);
  PYCOMM_CUDA_CHECK(*memory.driver_, cuMemCreate, &memory.handle_, memory.nbytes_, &prop, 0);
  memory.has_handle_ = true;
  memory.map(readers);
  return memory;
}

DeviceMemory DeviceMemory::import(Device device, int fd, size_t nbytes) {
  DeviceMemory memory = import_multicast(device, fd, nbytes);  // both are handles
  memory.map({device});
  return memory;
}

DeviceMemory DeviceMemory::create_multicast(Device device, size_t nbytes, int num_devices) {
  DeviceMemory memory(Kind::virtual_memory, device, nbytes);
  ContextGuard guard(device);
  const MulticastProp prop = multicast_prop(nbytes, num_devices);
  PYCOMM_CUDA_CHECK(*memory.driver_, cuMulticastCreate, &memory.handle_, &prop);
  memory.has_handle_ = true;
  return memory;
}

DeviceMemory DeviceMemory::import_multicast(Device device, int fd, size_t nbytes) {
  DeviceMemory memory(Kind::virtual_memory, device, nbytes);
  ContextGuard guard(device);
  void* const shareable = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  PYCOMM_CUDA_CHECK(*memory.driver_, cuMemImportFromShareableHandle, &memory.handle_, shareable,
                    flag::handle_posix_fd);
  memory.has_handle_ = true;
  return memory;
}

void DeviceMemory::map(const std::vector<Device>& readers) {
  ContextGuard guard(device_);
  PYCOMM_CUDA_CHECK(*driver_, cuMemAddressReserve, &address_, nbytes_, block_alignment, 0, 0);
  reserved_ = true;
  PYCOMM_CUDA_CHECK(*driver_, cuMemMap, address_, nbytes_, 0, handle_, 0);
  mapped_ = true;
  std::vector<MemAccessDesc> access;
  for (Device reader : readers) access.push_back({{flag::location_device, reader}, flag::access_read_write});
  PYCOMM_CUDA_CHECK(*driver_, cuMemSetAccess, address_, nbytes_, access.data(), access.size());
}

void DeviceMemory::add_device() { PYCOMM_CUDA_CHECK(*driver_, cuMulticastAddDevice, handle_, device_); }

void DeviceMemory::bind(const DeviceMemory& memory) {
  ContextGuard guard(device_);
  PYCOMM_CUDA_CHECK(*driver_, cuMulticastBindMem, handle_, 0, memory.handle_, 0, nbytes_, 0);
  bound_ = true;
}

IpcHandle DeviceMemory::ipc_handle() const {
  IpcHandle handle{};
  ContextGuard guard(device_);
  PYCOMM_CUDA_CHECK(*driver_, cuIpcGetMemHandle, &handle, address_);
  return handle;
}

int DeviceMemory::export_fd() const {
  int fd = -1;
  ContextGuard guard(device_);
  PYCOMM_CUDA_CHECK(*driver_, cuMemExportToShareableHandle, &fd, handle_, flag::handle_posix_fd, 0);
  return fd;
}

size_t multicast_granularity(size_t nbytes, int num_devices) {
  const MulticastProp prop = multicast_prop(round_to(nbytes, block_alignment), num_devices);
  size_t granularity = 0;
  PYCOMM_CUDA_CHECK(require_driver(), cuMulticastGetGranularity, &granularity, &prop,
                    flag::granularity_recommended);
  return granularity;
}

void copy_now(Device device, void* to, const void* from, size_t nbytes) {
  const Driver& table = require_driver();
  ContextGuard guard(device);
  OwnStream stream(table);
  PYCOMM_CUDA_CHECK(table, cuMemcpyAsync, reinterpret_cast<DevicePtr>(to), reinterpret_cast<DevicePtr>(from),
                    nbytes, stream);
  PYCOMM_CUDA_CHECK(table, cuStreamSynchronize, stream);
}

void zero_now(Device device, void* to, size_t nbytes) {
  const Driver& table = require_driver();
  ContextGuard guard(device);
  OwnStream stream(table);
  PYCOMM_CUDA_CHECK(table, cuMemsetD8Async, reinterpret_cast<DevicePtr>(to), 0, nbytes, stream);
  PYCOMM_CUDA_CHECK(table, cuStreamSynchronize, stream);
}

}  // namespace pycomm::cuda
