// driver.h -- the CUDA driver API as a table of function pointers.
//
// The host code of csrc/cuda includes no CUDA header and links no CUDA library: it is built by g++
// everywhere, imports on machines without a driver, and its tests put a driver of their own in place
// (use_driver). Types, values and signatures below are those of cuda.h; tests/cpp/cuda/driver_abi_test.cc
// compares them wherever a toolkit is installed. The opaque structs have their global names, so a Stream is a
// cudaStream_t for the compiler, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphEdgeData_st;

namespace pycomm::cuda {

using Device = int;  // ordinal among the visible devices
using DevicePtr = unsigned long long;
using MemHandle = unsigned long long;  // of physical memory or of a multicast object
using Context = CUctx_st*;
using Stream = CUstream_st*;
using Event = CUevent_st*;

struct Uuid {
  char bytes[16];
};

struct IpcHandle {
  char reserved[64];
};

struct MemLocation {
  int type;
  int id;
};

struct MemAllocationProp {
  int type;
  int handle_types;
  MemLocation location;
  void* win32_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

struct MemAccessDesc {
  MemLocation location;
  int flags;
};

struct MulticastProp {
  unsigned int num_devices;
  size_t size;
  unsigned long long handle_types;
  unsigned long long flags;
};

// One of those that cuStreamBatchMemOp takes, of 32 bits.
struct BatchMemOp {
  int operation;
  DevicePtr address;
  unsigned long long value;
  unsigned int flags;
  DevicePtr alias;  // the driver's own
  unsigned long long padding;
};

namespace result {  // CUresult
inline constexpr int success = 0, invalid_value = 1, out_of_memory = 2, not_initialized = 3, no_device = 100,
                     invalid_device = 101, invalid_context = 201, map_failed = 205,
                     peer_access_unsupported = 217, operating_system = 304, invalid_handle = 400,
                     not_found = 500, not_ready = 600, peer_access_already_enabled = 704, illegal_state = 401,
                     launch_timeout = 702, already_registered = 712, not_permitted = 800, not_supported = 801,
                     unknown = 999;
}

namespace attribute {  // CUdevice_attribute
inline constexpr int multiprocessor_count = 16, unified_addressing = 41, compute_capability_major = 75,
                     compute_capability_minor = 76, virtual_memory = 102, posix_fd_handles = 103,
                     stream_memory_operations_64 = 122, multicast = 132, mps = 133;
}

namespace flag {
inline constexpr unsigned int ipc_lazy_peer_access = 1;
inline constexpr unsigned int stream_non_blocking = 1;
inline constexpr unsigned int event_default = 0, event_disable_timing = 2;
inline constexpr unsigned int wait_geq = 0, wait_eq = 1,
                              wait_and = 2;  // geq: (int32_t)(*address - value) >= 0
inline constexpr int batch_wait = 1, batch_write = 2;  // BatchMemOp::operation
inline constexpr size_t batch_most = 256;
inline constexpr unsigned int write_default = 0;  // orders the stream's earlier writes before this one
inline constexpr unsigned int host_portable = 1,
                              host_device_map = 2;  // cuMemHostAlloc, and cuMemHostRegister
inline constexpr int allocation_pinned = 1, location_device = 1, handle_posix_fd = 1, access_read_write = 3;
inline constexpr int granularity_minimum = 0, granularity_recommended = 1;
inline constexpr int capture_mode_relaxed = 2;
inline constexpr int capture_none = 0, capture_active = 1, capture_invalidated = 2;
}  // namespace flag

// X(name, the CUDA version that introduced this form, parameters). Names are without suffix (_v2): the
// version selects the form.
// clang-format off
#define PYCOMM_CUDA_DRIVER_FUNCTIONS(X)                                                                     \
  X(cuGetErrorName, 6000, (int error, const char** text))                                                   \
  X(cuGetErrorString, 6000, (int error, const char** text))                                                 \
  X(cuInit, 2000, (unsigned int flags))                                                                     \
  X(cuDeviceGet, 2000, (Device* device, int ordinal))                                                       \
  X(cuDeviceGetCount, 2000, (int* count))                                                                   \
  X(cuDeviceGetName, 2000, (char* name, int nbytes, Device device))                                         \
  X(cuDeviceGetAttribute, 2000, (int* value, int attribute, Device device))                                 \
  X(cuDeviceGetUuid, 11040, (Uuid* uuid, Device device))                                                    \
  X(cuDevicePrimaryCtxRetain, 7000, (Context* context, Device device))                                      \
  X(cuDevicePrimaryCtxRelease, 11000, (Device device))                                                      \
  X(cuCtxGetCurrent, 4000, (Context* context))                                                              \
  X(cuCtxSetCurrent, 4000, (Context context))                                                               \
  X(cuDeviceCanAccessPeer, 4000, (int* can, Device device, Device peer))                                    \
  X(cuCtxEnablePeerAccess, 4000, (Context peer, unsigned int flags))                                        \
  X(cuMemAlloc, 3020, (DevicePtr* address, size_t nbytes))                                                  \
  X(cuMemFree, 3020, (DevicePtr address))                                                                   \
  X(cuMemHostAlloc, 2020, (void** address, size_t nbytes, unsigned int flags))                              \
  X(cuMemFreeHost, 2000, (void* address))                                                                   \
  X(cuMemHostRegister, 6050, (void* address, size_t nbytes, unsigned int flags))                            \
  X(cuMemHostUnregister, 4000, (void* address))                                                             \
  X(cuMemHostGetDevicePointer, 3020, (DevicePtr* address, void* host, unsigned int flags))                  \
  X(cuMemsetD8Async, 3020, (DevicePtr address, unsigned char value, size_t nbytes, Stream stream))          \
  X(cuMemcpyAsync, 4000, (DevicePtr to, DevicePtr from, size_t nbytes, Stream stream))                      \
  X(cuIpcGetMemHandle, 4010, (IpcHandle* handle, DevicePtr address))                                        \
  X(cuIpcOpenMemHandle, 11000, (DevicePtr* address, IpcHandle handle, unsigned int flags))                  \
  X(cuIpcCloseMemHandle, 4010, (DevicePtr address))                                                         \
  X(cuMemGetAllocationGranularity, 10020, (size_t* nbytes, const MemAllocationProp* prop, int option))      \
  X(cuMemCreate, 10020,                                                                                     \
    (MemHandle* handle, size_t nbytes, const MemAllocationProp* prop, unsigned long long flags))            \
  X(cuMemRelease, 10020, (MemHandle handle))                                                                \
  X(cuMemAddressReserve, 10020,                                                                             \
    (DevicePtr* address, size_t nbytes, size_t alignment, DevicePtr wish, unsigned long long flags))        \
  X(cuMemAddressFree, 10020, (DevicePtr address, size_t nbytes))                                            \
  X(cuMemMap, 10020,                                                                                        \
    (DevicePtr address, size_t nbytes, size_t offset, MemHandle handle, unsigned long long flags))          \
  X(cuMemUnmap, 10020, (DevicePtr address, size_t nbytes))                                                  \
  X(cuMemSetAccess, 10020, (DevicePtr address, size_t nbytes, const MemAccessDesc* access, size_t count))   \
  X(cuMemExportToShareableHandle, 10020,                                                                    \
    (void* shareable, MemHandle handle, int type, unsigned long long flags))                                \
  X(cuMemImportFromShareableHandle, 10020, (MemHandle* handle, void* shareable, int type))                  \
  X(cuMulticastCreate, 12010, (MemHandle* handle, const MulticastProp* prop))                               \
  X(cuMulticastAddDevice, 12010, (MemHandle handle, Device device))                                         \
  X(cuMulticastBindMem, 12010, (MemHandle handle, size_t offset, MemHandle memory,                          \
     size_t memory_offset, size_t nbytes, unsigned long long flags))                                        \
  X(cuMulticastUnbind, 12010, (MemHandle handle, Device device, size_t offset, size_t nbytes))              \
  X(cuMulticastGetGranularity, 12010, (size_t* nbytes, const MulticastProp* prop, int option))              \
  X(cuStreamCreateWithPriority, 5050, (Stream* stream, unsigned int flags, int priority))                   \
  X(cuStreamDestroy, 4000, (Stream stream))                                                                 \
  X(cuStreamSynchronize, 2000, (Stream stream))                                                             \
  X(cuStreamQuery, 2000, (Stream stream))                                                                   \
  X(cuStreamWaitEvent, 3020, (Stream stream, Event event, unsigned int flags))                              \
  X(cuStreamGetCaptureInfo, 12030, (Stream stream, int* status, uint64_t* id, CUgraph_st** graph,           \
     CUgraphNode_st* const** dependencies, const CUgraphEdgeData_st** edges, size_t* num_dependencies))     \
  X(cuStreamBatchMemOp, 11070,                                                                              \
    (Stream stream, unsigned int count, BatchMemOp* operations, unsigned int flags))                        \
  X(cuEventCreate, 2000, (Event* event, unsigned int flags))                                                \
  X(cuEventDestroy, 4000, (Event event))                                                                    \
  X(cuEventRecord, 2000, (Event event, Stream stream))                                                      \
  X(cuEventQuery, 2000, (Event event))                                                                      \
  X(cuEventSynchronize, 2000, (Event event))                                                                \
  X(cuEventElapsedTime, 2000, (float* ms, Event begin, Event end))                                          \
  X(cuThreadExchangeStreamCaptureMode, 10010, (int* mode))
// clang-format on

struct Driver {
#define PYCOMM_CUDA_FIELD(name, version, parameters) int(*name) parameters = nullptr;
  PYCOMM_CUDA_DRIVER_FUNCTIONS(PYCOMM_CUDA_FIELD)
#undef PYCOMM_CUDA_FIELD
};

// Implemented with the kernels: kernels/launch.cu in builds with nvcc, kernels/stub.cc in others.
bool built_with_cuda();
// The driver's entry point of that name in the form that CUDA `version` (as in 12030 for 12.3) introduced;
// nullptr without a driver or where the driver is older. Uses cudaGetDriverEntryPointByVersion.
void* driver_symbol(const char* name, int cuda_version);

// The table, loaded and initialised (cuInit) at the first call; nullptr where CUDA cannot be used, and
// driver_problem() says why.
const Driver* driver();
std::string driver_problem();
// The same, or throws std::runtime_error(driver_problem()).
const Driver& require_driver();
// Replaces the table, e.g. for tests; nullptr: the machine's own again. Nothing made through the former one
// may be in use.
void use_driver(const Driver* replacement);

// Throws std::runtime_error("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory)").
void check(int result, const char* call);
// That text.
std::string describe_result(int result, const char* call);

#define PYCOMM_CUDA_CHECK(table, function, ...) \
  ::pycomm::cuda::check((table).function(__VA_ARGS__), #function)

// The primary context of a device, which torch and the CUDA runtime use as well. Retained once per process
// and never released (as the runtime does), so memory outlives whoever asked for it first.
Context primary_context(Device device);

// Makes the primary context of `device` current in this thread, and in its destructor what was current
// before.
class ContextGuard {
 public:
  explicit ContextGuard(Device device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;

 private:
  const Driver& driver_;
  Context previous_ = nullptr;
  bool changed_ = false;
};

// In the capture mode that torch.cuda.graph uses, a query of an event by any thread ends every capture of the
// process, unless that thread has said otherwise for itself: as it does while it has one of these.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  void exchange() { require_driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  int mode_ = flag::capture_mode_relaxed;
};

// Which graph capture a stream takes part in. An invalidated capture counts as active: calls that are
// forbidden in it still are.
struct Capture {
  bool active = false;
  uint64_t id = 0;  // unique in the process
};
Capture capture_of(Stream stream);

}  // namespace pycomm::cuda
