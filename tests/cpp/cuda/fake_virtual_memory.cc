// fake_virtual_memory.cc -- handles, reserved addresses and multicast objects of the fake driver.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_state.h"
#include "fake_touch.h"

namespace pycomm::cuda {

namespace {

constexpr size_t granularity = 2 << 20;

void* as_host(DevicePtr address) { return reinterpret_cast<void*>(address); }

// Called with the state locked; nullptr: no such handle.
std::shared_ptr<FakeFile> file_of(FakeState& state, MemHandle handle) {
  const auto found = state.handles.find(handle);
  return found == state.handles.end() ? nullptr : found->second;
}

int machine_device(int device) { return fake_settings().first_device + device; }

int cuMemGetAllocationGranularity(size_t* nbytes, const MemAllocationProp*, int) {
  FAKE_ENTER(cuMemGetAllocationGranularity);
  *nbytes = granularity;
  return result::success;
}

int cuMemCreate(MemHandle* handle, size_t nbytes, const MemAllocationProp* prop, unsigned long long) {
  FAKE_ENTER(cuMemCreate);
  if (!fake_settings().vmm) return result::not_supported;
  if (nbytes % granularity || prop->type != flag::allocation_pinned ||
      prop->location.type != flag::location_device)
    return result::invalid_value;
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const int device = machine_device(prop->location.id);
  auto file = fake_create_file(nbytes, device, false);
  if (!file || !fake_take_memory(state, *file, device)) return result::out_of_memory;
  state.handles[*handle = state.next_handle++] = file;
  return result::success;
}

int cuMemRelease(MemHandle handle) {
  FAKE_ENTER(cuMemRelease);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const auto file = file_of(state, handle);
  if (!file) return result::invalid_value;
  if (file->counted)
    state.used[file->tail->device] -= file->nbytes;  // mappings that outlive the handle are not counted
  state.handles.erase(handle);
  return result::success;
}

int cuMemAddressReserve(DevicePtr* address, size_t nbytes, size_t alignment, DevicePtr, unsigned long long) {
  FAKE_ENTER(cuMemAddressReserve);
  if (nbytes % granularity || (alignment & (alignment - 1))) return result::invalid_value;
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  void* const at =
      ::mmap(nullptr, nbytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return result::out_of_memory;
  const auto first = reinterpret_cast<DevicePtr>(at),
             aligned = (first + alignment - 1) / alignment * alignment;
  if (aligned > first) ::munmap(at, aligned - first);
  if (first + alignment > aligned) ::munmap(as_host(aligned + nbytes), first + alignment - aligned);
  *address = aligned;
  state.mappings[aligned] = {FakeMapping::Kind::reserved, nbytes, nullptr};
  return result::success;
}

FakeMapping* reservation(FakeState& state, DevicePtr address, size_t nbytes) {
  const auto found = state.mappings.find(address);
  const bool fits = found != state.mappings.end() && found->second.kind == FakeMapping::Kind::reserved &&
                    found->second.nbytes == nbytes;
  return fits ? &found->second : nullptr;
}

int cuMemAddressFree(DevicePtr address, size_t nbytes) {
  FAKE_ENTER(cuMemAddressFree);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const FakeMapping* const mapping = reservation(state, address, nbytes);
  if (!mapping || mapping->file) return result::invalid_value;
  ::munmap(as_host(address), nbytes);
  state.mappings.erase(address);
  return result::success;
}

int cuMemMap(DevicePtr address, size_t nbytes, size_t offset, MemHandle handle, unsigned long long) {
  FAKE_ENTER(cuMemMap);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  FakeMapping* const mapping = reservation(state, address, nbytes);
  const auto file = file_of(state, handle);
  if (!mapping || mapping->file || !file || offset || nbytes != file->nbytes) return result::invalid_value;
  if (file->tail->is_multicast && file->tail->added != file->tail->num_devices)
    return result::illegal_state;  // would block
  if (::mmap(as_host(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file->fd, 0) == MAP_FAILED)
    return result::map_failed;
  mapping->file = file;
  return result::success;
}

int cuMemUnmap(DevicePtr address, size_t nbytes) {
  FAKE_ENTER(cuMemUnmap);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  FakeMapping* const mapping = reservation(state, address, nbytes);
  if (!mapping || !mapping->file) return result::invalid_value;
  ::mmap(as_host(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapping->file.reset();
  return result::success;
}

int cuMemSetAccess(DevicePtr address, size_t nbytes, const MemAccessDesc* access, size_t count) {
  FAKE_ENTER(cuMemSetAccess);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const FakeMapping* const mapping = reservation(state, address, nbytes);
  if (!mapping || !mapping->file || !count) return result::invalid_value;
  for (size_t i = 0; i < count; ++i) {
    if (access[i].flags != flag::access_read_write || access[i].location.type != flag::location_device)
      return result::invalid_value;
    const bool may = mapping->file->tail->is_multicast ||
                     fake_may_address(machine_device(access[i].location.id), mapping->file->tail->device);
    if (!may) return result::invalid_device;
  }
  return ::mprotect(as_host(address), nbytes, PROT_READ | PROT_WRITE) == 0 ? result::success
                                                                           : result::unknown;
}

int cuMemExportToShareableHandle(void* shareable, MemHandle handle, int type, unsigned long long) {
  FAKE_ENTER(cuMemExportToShareableHandle);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const auto file = file_of(state, handle);
  if (!file || type != flag::handle_posix_fd) return result::invalid_value;
  const int fd = ::fcntl(file->fd, F_DUPFD_CLOEXEC, 0);
  *static_cast<int*>(shareable) = fd;
  return fd < 0 ? result::operating_system : result::success;
}

int cuMemImportFromShareableHandle(MemHandle* handle, void* shareable, int type) {
  FAKE_ENTER(cuMemImportFromShareableHandle);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const int fd = ::fcntl(static_cast<int>(reinterpret_cast<intptr_t>(shareable)), F_DUPFD_CLOEXEC, 0);
  auto file = fd < 0 ? nullptr : fake_open_file(fd);
  if (!file || type != flag::handle_posix_fd) return result::invalid_value;
  state.handles[*handle = state.next_handle++] = file;
  return result::success;
}

// --- multicast: an object that counts its devices, and plain memory behind its address ---

int cuMulticastGetGranularity(size_t* nbytes, const MulticastProp*, int) {
  FAKE_ENTER(cuMulticastGetGranularity);
  *nbytes = 2 * granularity;
  return fake_settings().multicast ? result::success : result::not_supported;
}

int cuMulticastCreate(MemHandle* handle, const MulticastProp* prop) {
  FAKE_ENTER(cuMulticastCreate);
  if (!fake_settings().multicast) return result::not_supported;
  if (prop->size % (2 * granularity) || prop->num_devices < 2) return result::invalid_value;
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  auto file = fake_create_file(prop->size, -1, true);
  if (!file) return result::out_of_memory;
  file->tail->num_devices = prop->num_devices;
  state.handles[*handle = state.next_handle++] = file;
  return result::success;
}

int cuMulticastAddDevice(MemHandle handle, Device) {
  FAKE_ENTER(cuMulticastAddDevice);
  std::lock_guard lock(fake_state().mutex);
  const auto file = file_of(fake_state(), handle);
  if (!file || !file->tail->is_multicast) return result::invalid_value;
  ++file->tail->added;
  return result::success;
}

int cuMulticastBindMem(MemHandle handle, size_t offset, MemHandle memory, size_t memory_offset, size_t nbytes,
                       unsigned long long) {
  FAKE_ENTER_IN_CONTEXT(cuMulticastBindMem);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const auto file = file_of(state, handle), bound = file_of(state, memory);
  if (!file || !bound || offset || memory_offset || nbytes % (2 * granularity) || nbytes > bound->nbytes ||
      nbytes > file->nbytes)
    return result::invalid_value;
  if (file->tail->added != file->tail->num_devices) return result::illegal_state;  // would block
  ++state.bindings[{handle, bound->tail->device}];
  return result::success;
}

int cuMulticastUnbind(MemHandle handle, Device device, size_t, size_t) {
  FAKE_ENTER(cuMulticastUnbind);
  std::lock_guard lock(fake_state().mutex);
  return fake_state().bindings.erase({handle, machine_device(device)}) ? result::success
                                                                       : result::invalid_value;
}

}  // namespace

void fake_add_virtual_memory_functions(Driver& table) {
#define FAKE_ADD(name) table.name = name
  FAKE_ADD(cuMemGetAllocationGranularity);
  FAKE_ADD(cuMemCreate);
  FAKE_ADD(cuMemRelease);
  FAKE_ADD(cuMemAddressReserve);
  FAKE_ADD(cuMemAddressFree);
  FAKE_ADD(cuMemMap);
  FAKE_ADD(cuMemUnmap);
  FAKE_ADD(cuMemSetAccess);
  FAKE_ADD(cuMemExportToShareableHandle);
  FAKE_ADD(cuMemImportFromShareableHandle);
  FAKE_ADD(cuMulticastGetGranularity);
  FAKE_ADD(cuMulticastCreate);
  FAKE_ADD(cuMulticastAddDevice);
  FAKE_ADD(cuMulticastBindMem);
  FAKE_ADD(cuMulticastUnbind);
#undef FAKE_ADD
}

bool fake_touch(DevicePtr address, size_t nbytes, const std::function<void()>& access) {
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  auto found = state.mappings.upper_bound(address);
  if (found == state.mappings.begin()) return false;
  --found;
  if (address + nbytes > found->first + found->second.nbytes) return false;
  access();
  return true;
}

}  // namespace pycomm::cuda
