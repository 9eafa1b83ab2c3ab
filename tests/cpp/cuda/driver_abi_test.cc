// driver_abi_test.cc -- cuda/device/driver.h against cuda.h, at compile time: the program has nothing to run.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <type_traits>

#include "../../../csrc/cuda/device/driver.h"

namespace pycomm::cuda {

// Whether a caller that believes the one and a callee that believes the other agree: pointers to whatever,
// numbers of equal size, structs of equal size and alignment that go through the same registers (checked
// member by member below).
template <class Ours, class Theirs>
constexpr bool same_value() {
  if constexpr (std::is_same_v<Ours, Theirs>) return true;
  else if constexpr (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>)
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  else if constexpr (std::is_class_v<Ours>)
    return (std::is_class_v<Theirs> || std::is_union_v<Theirs>) && sizeof(Ours) == sizeof(Theirs) &&
           alignof(Ours) == alignof(Theirs);
  else return (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>) && sizeof(Ours) == sizeof(Theirs);
}

// What a pointer parameter points to, where the callee reads or writes through it.
template <class Ours, class Theirs>
constexpr bool same_parameter() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using A = std::remove_cv_t<std::remove_pointer_t<Ours>>;
    using B = std::remove_cv_t<std::remove_pointer_t<Theirs>>;
    if constexpr (std::is_void_v<A> || std::is_void_v<B> || std::is_function_v<A>)
      return std::is_same_v<A, B>;
    else if constexpr (std::is_class_v<A> && !std::is_same_v<A, B>) return same_value<A, B>();
    else if constexpr (std::is_class_v<A>) return true;  // opaque: the very same struct
    else return same_parameter<A, B>();
  } else {
    return same_value<Ours, Theirs>();
  }
}

template <class Ours, class Theirs>
struct SameFunction : std::false_type {};
template <class... Ours, class... Theirs>
struct SameFunction<int (*)(Ours...), CUresult (*)(Theirs...)>
    : std::bool_constant<sizeof...(Ours) == sizeof...(Theirs) && (same_parameter<Ours, Theirs>() && ...)> {};

template <class... Ours, class... Theirs>
  requires(sizeof...(Ours) != sizeof...(Theirs))
struct SameFunction<int (*)(Ours...), CUresult (*)(Theirs...)> : std::false_type {};

#define CHECK_FUNCTION(name, version, parameters)                                     \
  static_assert(SameFunction<decltype(Driver::name), PFN_##name##_v##version>::value, \
                #name " differs from cuda.h");
PYCOMM_CUDA_DRIVER_FUNCTIONS(CHECK_FUNCTION)

// --- a check of the check ---
static_assert(!SameFunction<int (*)(int), CUresult (*)(long)>::value);
static_assert(!SameFunction<int (*)(int*), CUresult (*)(size_t*)>::value);
static_assert(!SameFunction<int (*)(int), CUresult (*)(int, int)>::value);

#define SAME_MEMBER(ours, member, theirs, their_member)                                                 \
  static_assert(offsetof(ours, member) == offsetof(theirs, their_member) &&                             \
                    sizeof(std::declval<ours>().member) == sizeof(std::declval<theirs>().their_member), \
                #ours "::" #member " differs from cuda.h")

static_assert(sizeof(Uuid) == sizeof(CUuuid) && sizeof(IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(MemAllocationProp) == sizeof(CUmemAllocationProp) &&
              sizeof(MulticastProp) == sizeof(CUmulticastObjectProp));
static_assert(std::is_same_v<Stream, CUstream> && std::is_same_v<Event, CUevent> &&
              std::is_same_v<Context, CUcontext>);
static_assert(std::is_same_v<DevicePtr, CUdeviceptr> && std::is_same_v<Device, CUdevice>);
static_assert(std::is_same_v<MemHandle, CUmemGenericAllocationHandle>);
SAME_MEMBER(MemLocation, type, CUmemLocation, type);
SAME_MEMBER(MemLocation, id, CUmemLocation, id);
SAME_MEMBER(MemAllocationProp, type, CUmemAllocationProp, type);
SAME_MEMBER(MemAllocationProp, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_MEMBER(MemAllocationProp, location, CUmemAllocationProp, location);
SAME_MEMBER(MemAllocationProp, win32_meta_data, CUmemAllocationProp, win32HandleMetaData);
SAME_MEMBER(MemAllocationProp, flags, CUmemAllocationProp, allocFlags);
SAME_MEMBER(MemAccessDesc, location, CUmemAccessDesc, location);
SAME_MEMBER(MemAccessDesc, flags, CUmemAccessDesc, flags);
SAME_MEMBER(MulticastProp, num_devices, CUmulticastObjectProp, numDevices);
SAME_MEMBER(MulticastProp, size, CUmulticastObjectProp, size);
SAME_MEMBER(MulticastProp, handle_types, CUmulticastObjectProp, handleTypes);
SAME_MEMBER(MulticastProp, flags, CUmulticastObjectProp, flags);

using Wait = decltype(CUstreamBatchMemOpParams::waitValue);
using Write = decltype(CUstreamBatchMemOpParams::writeValue);
static_assert(sizeof(BatchMemOp) == sizeof(CUstreamBatchMemOpParams));
SAME_MEMBER(BatchMemOp, operation, CUstreamBatchMemOpParams, operation);
SAME_MEMBER(BatchMemOp, address, Wait, address);
SAME_MEMBER(BatchMemOp, value, Wait, value64);
SAME_MEMBER(BatchMemOp, flags, Wait, flags);
SAME_MEMBER(BatchMemOp, alias, Wait, alias);
SAME_MEMBER(BatchMemOp, address, Write, address);
SAME_MEMBER(BatchMemOp, value, Write, value64);
SAME_MEMBER(BatchMemOp, flags, Write, flags);
SAME_MEMBER(BatchMemOp, alias, Write, alias);

#define SAME(ours, theirs) \
  static_assert(static_cast<long>(ours) == static_cast<long>(theirs), #ours " differs from cuda.h")
SAME(result::success, CUDA_SUCCESS);
SAME(result::invalid_value, CUDA_ERROR_INVALID_VALUE);
SAME(result::out_of_memory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(result::not_initialized, CUDA_ERROR_NOT_INITIALIZED);
SAME(result::no_device, CUDA_ERROR_NO_DEVICE);
SAME(result::invalid_device, CUDA_ERROR_INVALID_DEVICE);
SAME(result::invalid_context, CUDA_ERROR_INVALID_CONTEXT);
SAME(result::map_failed, CUDA_ERROR_MAP_FAILED);
SAME(result::peer_access_unsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
SAME(result::operating_system, CUDA_ERROR_OPERATING_SYSTEM);
SAME(result::invalid_handle, CUDA_ERROR_INVALID_HANDLE);
SAME(result::illegal_state, CUDA_ERROR_ILLEGAL_STATE);
SAME(result::not_found, CUDA_ERROR_NOT_FOUND);
SAME(result::not_ready, CUDA_ERROR_NOT_READY);
SAME(result::launch_timeout, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME(result::peer_access_already_enabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME(result::already_registered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(result::not_permitted, CUDA_ERROR_NOT_PERMITTED);
SAME(result::not_supported, CUDA_ERROR_NOT_SUPPORTED);
SAME(result::unknown, CUDA_ERROR_UNKNOWN);
SAME(attribute::multiprocessor_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(attribute::unified_addressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(attribute::compute_capability_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(attribute::compute_capability_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(attribute::virtual_memory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(attribute::posix_fd_handles, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(attribute::stream_memory_operations_64, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
SAME(attribute::multicast, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
SAME(attribute::mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
SAME(flag::ipc_lazy_peer_access, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(flag::stream_non_blocking, CU_STREAM_NON_BLOCKING);
SAME(flag::event_default, CU_EVENT_DEFAULT);
SAME(flag::event_disable_timing, CU_EVENT_DISABLE_TIMING);
SAME(flag::wait_geq, CU_STREAM_WAIT_VALUE_GEQ);
SAME(flag::wait_eq, CU_STREAM_WAIT_VALUE_EQ);
SAME(flag::wait_and, CU_STREAM_WAIT_VALUE_AND);
SAME(flag::batch_wait, CU_STREAM_MEM_OP_WAIT_VALUE_32);
SAME(flag::batch_write, CU_STREAM_MEM_OP_WRITE_VALUE_32);
SAME(flag::write_default, CU_STREAM_WRITE_VALUE_DEFAULT);
SAME(flag::host_portable, CU_MEMHOSTALLOC_PORTABLE);
SAME(flag::host_device_map, CU_MEMHOSTALLOC_DEVICEMAP);
SAME(flag::host_portable, CU_MEMHOSTREGISTER_PORTABLE);
SAME(flag::host_device_map, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(flag::allocation_pinned, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(flag::location_device, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(flag::handle_posix_fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(flag::access_read_write, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(flag::granularity_minimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(flag::granularity_recommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(flag::granularity_recommended, CU_MULTICAST_GRANULARITY_RECOMMENDED);
SAME(flag::capture_none, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(flag::capture_active, CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME(flag::capture_invalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);

}  // namespace pycomm::cuda
