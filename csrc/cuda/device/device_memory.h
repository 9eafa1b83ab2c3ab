// device_memory.h -- one block of device memory in this process: allocated here, or a mapping of another
// process's block.
//
// Two families (see peer_memory.h): cuMemAlloc with legacy IPC handles, and virtual memory management (VMM),
// where physical memory has a handle, can be exported as a file descriptor, and is mapped into a reserved
// range of addresses.
#pragma once

#include <sys/types.h>

#include <vector>

#include "driver.h"

namespace pycomm::cuda {

// Of size and address. Smaller blocks could share one IPC mapping with memory that is not ours.
inline constexpr size_t block_alignment = 2 << 20;

// Owns what it names; movable. Gives everything back in its destructor, silently. In a forked child it does
// nothing: the driver's objects belong to the parent.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory() { release(); }

  // Each throws std::runtime_error with the driver's call and reason.
  static DeviceMemory allocate(Device device, size_t nbytes);                    // cuMemAlloc
  static DeviceMemory open(Device device, const IpcHandle& handle);
  // VMM, exportable; `readers`: the devices of this process that address it. The size is rounded up to
  // `multiple`, 0: as the device wants.
  static DeviceMemory create(Device device, size_t nbytes, size_t multiple,
                             const std::vector<Device>& readers);
  static DeviceMemory import(Device device, int fd, size_t nbytes);              // fd stays the caller's
  // A multicast object: created or imported without addresses, which map() adds once all devices are in it.
  static DeviceMemory create_multicast(Device device, size_t nbytes, int num_devices);
  static DeviceMemory import_multicast(Device device, int fd, size_t nbytes);
  void map(const std::vector<Device>& readers);
  void add_device();  // this device to this multicast object
  void bind(const DeviceMemory& memory);  // of this device, likewise

  IpcHandle ipc_handle() const;
  int export_fd() const;  // the caller closes it

  explicit operator bool() const { return kind_ != Kind::none; }
  bool from_this_process() const;  // false in a forked child
  DevicePtr address() const { return address_; }
  size_t nbytes() const { return nbytes_; }
  MemHandle handle() const { return handle_; }
  void release() noexcept;

 private:
  enum class Kind { none, allocated, opened, virtual_memory };
  DeviceMemory(Kind kind, Device device, size_t nbytes);
  void swap(DeviceMemory& other) noexcept;

  Kind kind_ = Kind::none;
  Device device_ = 0;
  pid_t pid_ = 0;
  const Driver* driver_ = nullptr;
  DevicePtr address_ = 0;
  size_t nbytes_ = 0;
  MemHandle handle_ = 0;
  bool has_handle_ = false, reserved_ = false, mapped_ = false, bound_ = false;
};

size_t multicast_granularity(size_t nbytes, int num_devices);

// Copies on a stream of their own and waits for it. One of the addresses may be the host's. `device`: where
// the context is.
void copy_now(Device device, void* to, const void* from, size_t nbytes);
void zero_now(Device device, void* to, size_t nbytes);

}  // namespace pycomm::cuda
