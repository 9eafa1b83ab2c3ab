// fake_driver.cc -- devices, contexts and memory of the fake driver; see fake_driver.h.
#include "fake_driver.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "fake_state.h"
#include "fake_touch.h"

namespace pycomm::cuda {

namespace {

constexpr uint64_t magic = 0x66616b6563756461;
constexpr size_t tail_bytes = 4096;
static_assert(sizeof(FakeFile::Tail) <= tail_bytes);

FakeSettings settings;
std::atomic<FakeState*> current{nullptr};
std::mutex creation;

struct Handle {  // what an IpcHandle holds
  uint64_t magic;
  int32_t pid, fd;
  uint64_t nbytes;
};

FakeState* new_state() {
  auto* state = new FakeState;  // a former one is left alone: a forked child must not touch it
  state->pid = ::getpid();
  for (int d = 0; d < settings.devices; ++d) {
    state->contexts.push_back(std::make_unique<CUctx_st>());
    state->contexts.back()->device = d;
  }
  return state;
}

// What cuCtxSetCurrent said in this thread, for the driver that was there then.
thread_local Context current_context = nullptr;
thread_local FakeState* context_of = nullptr;

Context context() { return context_of == &fake_state() ? current_context : nullptr; }
int machine_device(Device device) { return settings.first_device + device; }

// Called with the state locked.
void violation(FakeState& state, const std::string& text) {
  std::fprintf(stderr, "fake driver: %s\n", text.c_str());
  state.violations += text + "\n";
}

// A process that ends takes a moment from the loss of its locks, by which others know, to its death.
bool stays_alive(int pid) {
  for (int tries = 0; tries < 100; ++tries) {
    std::string text;
    if (::kill(pid, 0) != 0 || (std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), text),
                                text.find(") Z ") != text.npos))
      return false;
    ::usleep(2000);
  }
  return true;
}

void* map_file(const FakeFile& file) {
  void* address = ::mmap(nullptr, file.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  return address == MAP_FAILED ? nullptr : address;
}

DevicePtr as_device(void* address) { return reinterpret_cast<DevicePtr>(address); }
void* as_host(DevicePtr address) { return reinterpret_cast<void*>(address); }

// --- devices and contexts ---

int cuGetErrorName(int error, const char** text) {
  static const std::map<int, const char*> names = {
      {result::success, "CUDA_SUCCESS"},
      {result::invalid_value, "CUDA_ERROR_INVALID_VALUE"},
      {result::out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {result::invalid_device, "CUDA_ERROR_INVALID_DEVICE"},
      {result::invalid_context, "CUDA_ERROR_INVALID_CONTEXT"},
      {result::map_failed, "CUDA_ERROR_MAP_FAILED"},
      {result::peer_access_unsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
      {result::invalid_handle, "CUDA_ERROR_INVALID_HANDLE"},
      {result::illegal_state, "CUDA_ERROR_ILLEGAL_STATE"},
      {result::launch_timeout, "CUDA_ERROR_LAUNCH_TIMEOUT"},
      {result::peer_access_already_enabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"},
      {result::not_supported, "CUDA_ERROR_NOT_SUPPORTED"}};
  const auto found = names.find(error);
  *text = found == names.end() ? nullptr : found->second;
  return *text ? result::success : result::invalid_value;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == result::out_of_memory ? "out of memory" : "an error of the fake driver";
  return result::success;
}

int cuInit(unsigned int) { return fake_enter("cuInit"); }

int cuDeviceGetCount(int* count) {
  FAKE_ENTER(cuDeviceGetCount);
  *count = settings.devices;
  return result::success;
}

int cuDeviceGet(Device* device, int ordinal) {
  FAKE_ENTER(cuDeviceGet);
  *device = ordinal;
  return ordinal >= 0 && ordinal < settings.devices ? result::success : result::invalid_device;
}

int cuDeviceGetName(char* name, int nbytes, Device) {
  FAKE_ENTER(cuDeviceGetName);
  std::snprintf(name, static_cast<size_t>(nbytes), "Fake device");
  return result::success;
}

int cuDeviceGetUuid(Uuid* uuid, Device device) {
  FAKE_ENTER(cuDeviceGetUuid);
  *uuid = {};
  std::snprintf(uuid->bytes, sizeof(uuid->bytes), "fake-%d", machine_device(device));
  return result::success;
}

int cuDeviceGetAttribute(int* value, int what, Device) {
  FAKE_ENTER(cuDeviceGetAttribute);
  switch (what) {
    case attribute::multiprocessor_count: *value = settings.multiprocessors; break;
    case attribute::compute_capability_major: *value = settings.capability / 10; break;
    case attribute::compute_capability_minor: *value = settings.capability % 10; break;
    case attribute::mps: *value = settings.mps; break;
    case attribute::stream_memory_operations_64: *value = settings.stream_memory_operations; break;
    case attribute::multicast: *value = settings.multicast; break;
    case attribute::virtual_memory:
    case attribute::posix_fd_handles: *value = settings.vmm; break;
    case attribute::unified_addressing: *value = 1; break;
    default: return result::invalid_value;
  }
  return result::success;
}

int cuDevicePrimaryCtxRetain(Context* made, Device device) {
  FAKE_ENTER(cuDevicePrimaryCtxRetain);
  if (device < 0 || device >= settings.devices) return result::invalid_device;
  *made = fake_state().contexts[device].get();
  return result::success;
}

int cuDevicePrimaryCtxRelease(Device) { return fake_enter("cuDevicePrimaryCtxRelease"); }

int cuCtxGetCurrent(Context* now) {
  FAKE_ENTER(cuCtxGetCurrent);
  *now = context();
  return result::success;
}

int cuCtxSetCurrent(Context next) {
  FAKE_ENTER(cuCtxSetCurrent);
  current_context = next;
  context_of = &fake_state();
  return result::success;
}

int cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  FAKE_ENTER(cuDeviceCanAccessPeer);
  *can = device != peer && settings.peer_access;
  return result::success;
}

int cuCtxEnablePeerAccess(Context peer, unsigned int) {
  FAKE_ENTER_IN_CONTEXT(cuCtxEnablePeerAccess);
  if (peer == context()) return result::invalid_device;
  if (!settings.peer_access) return result::peer_access_unsupported;
  std::lock_guard lock(fake_state().mutex);
  return context()->peers.insert(peer->device).second ? result::success : result::peer_access_already_enabled;
}

// --- cuMemAlloc and legacy IPC ---

int cuMemAlloc(DevicePtr* address, size_t nbytes) {
  FAKE_ENTER_IN_CONTEXT(cuMemAlloc);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const int device = machine_device(context()->device);
  auto file = fake_create_file(std::max<size_t>(nbytes, 1), device, false);
  if (!file || !fake_take_memory(state, *file, device)) return result::out_of_memory;
  void* at = map_file(*file);
  std::memset(at, 0xa5, file->nbytes);  // fresh memory is not zeroed
  *address = as_device(at);
  state.mappings[*address] = {FakeMapping::Kind::allocated, file->nbytes, file};
  return result::success;
}

int cuMemFree(DevicePtr address) {
  FAKE_ENTER_IN_CONTEXT(cuMemFree);
  fake_wait_for_kernels("cuMemFree");
  return fake_free(address);
}

int cuIpcGetMemHandle(IpcHandle* handle, DevicePtr address) {
  FAKE_ENTER_IN_CONTEXT(cuIpcGetMemHandle);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const auto found = state.mappings.find(address);  // the base of an allocation, nothing inside it
  if (found == state.mappings.end() || found->second.kind != FakeMapping::Kind::allocated)
    return result::invalid_value;
  const Handle inside{magic, ::getpid(), found->second.file->fd, found->second.nbytes};
  *handle = {};
  std::memcpy(handle, &inside, sizeof(inside));
  return result::success;
}

int cuIpcOpenMemHandle(DevicePtr* address, IpcHandle handle, unsigned int flags) {
  FAKE_ENTER_IN_CONTEXT(cuIpcOpenMemHandle);
  Handle inside;
  std::memcpy(&inside, &handle, sizeof(inside));
  if (!settings.ipc) return result::map_failed;
  if (inside.magic != magic || flags != flag::ipc_lazy_peer_access) return result::invalid_value;
  if (inside.pid == ::getpid()) return result::invalid_context;
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  for (auto& [at, mapping] : state.mappings)
    if (mapping.kind == FakeMapping::Kind::ipc && mapping.pid == inside.pid && mapping.fd == inside.fd) {
      ++mapping.opened;
      *address = at;
      return result::success;
    }
  const std::string path = "/proc/" + std::to_string(inside.pid) + "/fd/" + std::to_string(inside.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  auto file = fd < 0 ? nullptr : fake_open_file(fd);
  if (!file || file->tail->magic != magic) return result::invalid_handle;
  if (!fake_may_address(machine_device(context()->device), file->tail->device))
    return result::peer_access_unsupported;
  for (auto& user : file->tail->users) {
    int32_t nobody = 0;
    if (user.compare_exchange_strong(nobody, state.pid)) break;
  }
  *address = as_device(map_file(*file));
  state.mappings[*address] = {FakeMapping::Kind::ipc, file->nbytes, file, inside.pid, inside.fd};
  return result::success;
}

int cuIpcCloseMemHandle(DevicePtr address) {
  FAKE_ENTER_IN_CONTEXT(cuIpcCloseMemHandle);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const auto found = state.mappings.find(address);
  if (found == state.mappings.end() || found->second.kind != FakeMapping::Kind::ipc)
    return result::invalid_value;
  if (--found->second.opened > 0) return result::success;
  ::munmap(as_host(address), found->second.nbytes);
  for (auto& user : found->second.file->tail->users) {
    int32_t mine = state.pid;
    if (user.compare_exchange_strong(mine, 0)) break;
  }
  state.mappings.erase(found);
  return result::success;
}

// --- host memory ---

int cuMemHostAlloc(void** address, size_t nbytes, unsigned int) {
  FAKE_ENTER_IN_CONTEXT(cuMemHostAlloc);
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  *address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED) return result::out_of_memory;
  state.mappings[as_device(*address)] = {FakeMapping::Kind::host, nbytes, nullptr};
  return result::success;
}

int cuMemFreeHost(void* address) {
  FAKE_ENTER_IN_CONTEXT(cuMemFreeHost);
  fake_wait_for_kernels("cuMemFreeHost");
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const auto found = state.mappings.find(as_device(address));
  if (found == state.mappings.end() || found->second.kind != FakeMapping::Kind::host)
    return result::invalid_value;
  ::munmap(address, found->second.nbytes);
  state.mappings.erase(found);
  return result::success;
}

int cuMemHostRegister(void* address, size_t, unsigned int) {
  FAKE_ENTER_IN_CONTEXT(cuMemHostRegister);
  std::lock_guard lock(fake_state().mutex);
  return fake_state().registrations.insert(address).second ? result::success : result::already_registered;
}

int cuMemHostUnregister(void* address) {
  FAKE_ENTER_IN_CONTEXT(cuMemHostUnregister);
  fake_wait_for_kernels("cuMemHostUnregister");
  std::lock_guard lock(fake_state().mutex);
  return fake_state().registrations.erase(address) ? result::success : result::invalid_value;
}

int cuMemHostGetDevicePointer(DevicePtr* address, void* host, unsigned int) {
  FAKE_ENTER_IN_CONTEXT(cuMemHostGetDevicePointer);
  *address = as_device(host);
  return result::success;
}

}  // namespace

FakeFile::~FakeFile() {
  if (tail) ::munmap(tail, tail_bytes);
  if (fd >= 0) ::close(fd);
}

FakeState& fake_state() {
  FakeState* state = current.load();
  if (state && state->pid == ::getpid()) return *state;
  std::lock_guard lock(creation);
  state = current.load();
  if (!state || state->pid != ::getpid()) current.store(state = new_state());
  return *state;
}

int fake_enter(const char* function) {
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const int call = ++state.calls[function];
  const auto found = state.failures.find(function);
  return found != state.failures.end() && found->second.first == call ? found->second.second
                                                                      : result::success;
}

int fake_free(DevicePtr address) {
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  const auto found = state.mappings.find(address);
  if (found == state.mappings.end() || found->second.kind != FakeMapping::Kind::allocated)
    return result::invalid_value;
  FakeFile& file = *found->second.file;
  for (auto& user : file.tail->users)
    if (const int pid = user.load(); pid && stays_alive(pid))
      violation(state, "cuMemFree of memory that process " + std::to_string(pid) + " has mapped by IPC");
  state.used[file.tail->device] -= file.nbytes;
  ::munmap(as_host(address), file.nbytes);
  state.mappings.erase(found);
  return result::success;
}

void fake_wait_for_kernels(const char* function) {
  FakeState& state = fake_state();
  std::unique_lock lock(state.mutex);
  const int device = fake_current_device();
  if (!state.kernel_ended.wait_for(lock, std::chrono::duration<double>(settings.longest_wait),
                                   [&] { return state.kernels[device] == 0; }))
    violation(state, std::string(function) + " waited too long for kernels that run");
}

bool fake_has_context() { return context() != nullptr; }
int fake_current_device() { return context() ? context()->device : 0; }

// --- files ---

std::shared_ptr<FakeFile> fake_open_file(int fd) {
  auto file = std::make_shared<FakeFile>();
  struct stat info{};
  file->fd = fd;
  if (::fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) <= tail_bytes) return nullptr;
  file->nbytes = info.st_size - tail_bytes;
  void* tail =
      ::mmap(nullptr, tail_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(file->nbytes));
  if (tail == MAP_FAILED) return nullptr;
  file->tail = static_cast<FakeFile::Tail*>(tail);
  return file;
}

std::shared_ptr<FakeFile> fake_create_file(size_t nbytes, int device, bool is_multicast) {
  const size_t data_bytes = (nbytes + 4095) / 4096 * 4096;
  const int fd = ::memfd_create("fake-device-memory", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(data_bytes + tail_bytes)) != 0) return nullptr;
  auto file = fake_open_file(fd);
  if (!file) return nullptr;
  file->tail->magic = magic;
  file->tail->device = device;
  file->tail->is_multicast = is_multicast;
  return file;
}

bool fake_may_address(int device, int memory_device) {
  return device == memory_device || settings.peer_access;
}

bool fake_take_memory(FakeState& state, FakeFile& file, int device) {
  if (state.used[device] + file.nbytes > settings.memory_bytes) return false;
  state.used[device] += file.nbytes;
  file.counted = true;
  return true;
}

// --- control ---

std::string FakeCounts::describe() const {
  std::string text;
  auto add = [&](int n, const char* what) {
    if (n) text += std::to_string(n) + " " + what + "; ";
  };
  add(allocations, "allocations"), add(ipc_mappings, "IPC mappings"), add(reservations, "reservations"),
      add(mappings, "mappings");
  add(handles, "handles"), add(bindings, "bindings"), add(registrations, "registrations"),
      add(streams, "streams"), add(events, "events");
  return text;
}

FakeSettings& fake_settings() { return settings; }

FakeCounts fake_counts() {
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  FakeCounts counts;
  for (const auto& [address, mapping] : state.mappings) {
    using Kind = FakeMapping::Kind;
    if (mapping.kind == Kind::allocated || mapping.kind == Kind::host) ++counts.allocations;
    if (mapping.kind == Kind::ipc) counts.ipc_mappings += mapping.opened;
    if (mapping.kind == Kind::reserved) ++counts.reservations, counts.mappings += mapping.file != nullptr;
  }
  counts.handles = static_cast<int>(state.handles.size());
  counts.bindings = static_cast<int>(state.bindings.size());
  counts.registrations = static_cast<int>(state.registrations.size());
  counts.streams = state.streams;
  counts.events = state.events;
  return counts;
}

std::string fake_violations() {
  std::lock_guard lock(fake_state().mutex);
  return fake_state().violations;
}

void fake_violation(const std::string& text) {
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  violation(state, text);
}

void fake_fail(const std::string& function, int nth, int error) {
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  state.failures[function] = {state.calls[function] + nth, error};
}

int fake_calls(const std::string& function) {
  std::lock_guard lock(fake_state().mutex);
  return fake_state().calls[function];
}

void fake_reset() {
  std::lock_guard lock(creation);
  current.store(new_state());
}

const Driver* fake_driver() {
  static const Driver table = [] {
    Driver made;
#define FAKE_ADD(name) made.name = name
    FAKE_ADD(cuGetErrorName);
    FAKE_ADD(cuGetErrorString);
    FAKE_ADD(cuInit);
    FAKE_ADD(cuDeviceGet);
    FAKE_ADD(cuDeviceGetCount);
    FAKE_ADD(cuDeviceGetName);
    FAKE_ADD(cuDeviceGetAttribute);
    FAKE_ADD(cuDeviceGetUuid);
    FAKE_ADD(cuDevicePrimaryCtxRetain);
    FAKE_ADD(cuDevicePrimaryCtxRelease);
    FAKE_ADD(cuCtxGetCurrent);
    FAKE_ADD(cuCtxSetCurrent);
    FAKE_ADD(cuDeviceCanAccessPeer);
    FAKE_ADD(cuCtxEnablePeerAccess);
    FAKE_ADD(cuMemAlloc);
    FAKE_ADD(cuMemFree);
    FAKE_ADD(cuMemHostAlloc);
    FAKE_ADD(cuMemFreeHost);
    FAKE_ADD(cuMemHostRegister);
    FAKE_ADD(cuMemHostUnregister);
    FAKE_ADD(cuMemHostGetDevicePointer);
    FAKE_ADD(cuIpcGetMemHandle);
    FAKE_ADD(cuIpcOpenMemHandle);
    FAKE_ADD(cuIpcCloseMemHandle);
#undef FAKE_ADD
    fake_add_virtual_memory_functions(made);
    fake_add_stream_functions(made);
    return made;
  }();
  return &table;
}

}  // namespace pycomm::cuda
