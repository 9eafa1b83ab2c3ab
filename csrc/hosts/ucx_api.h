// ucx_api.h -- the part of UCX's interface (UCP) that the wire of ucx_wire.h uses, declared here, and the
// library that is opened while the process runs.
//
// Why declared here: pycomm builds without UCX, and runs with whatever UCX the machine has, often one with
// the drivers of its network. What stands here is UCP's binary interface: it has not changed since 1.10,
// newer versions add fields behind those that a mask says are set. tests/hosts/test_ucx.py compares it with
// the headers of an installed UCX, each size, place and value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pycomm::ucx {

struct Context;  // handles, known to UCX alone
struct Worker;
struct Endpoint;
struct Config;

using Status = int8_t;  // 0 or an error; packed
inline constexpr Status ok = 0, busy = -15, lowest_status = -100;

inline constexpr unsigned api_major = 1, api_minor = 13;  // the oldest that is taken

inline constexpr uint64_t feature_tag = 1 << 0, feature_wakeup = 1 << 4;

struct ContextParams {
  static constexpr uint64_t has_features = 1 << 0, has_estimated_num_eps = 1 << 6;
  uint64_t field_mask;
  uint64_t features;
  size_t request_size;
  void (*request_init)(void*);
  void (*request_cleanup)(void*);
  uint64_t tag_sender_mask;
  int mt_workers_shared;
  size_t estimated_num_eps;
  uint64_t others[16];  // not set
};

struct WorkerParams {
  static constexpr uint64_t has_thread_mode = 1 << 0;
  static constexpr uint32_t serialized = 1;  // one thread at a time
  uint64_t field_mask;
  uint32_t thread_mode;
  uint64_t others[64];  // not set
};

struct EndpointParams {
  static constexpr uint64_t has_address = 1 << 0, has_err_mode = 1 << 1, has_err_handler = 1 << 2;
  static constexpr int err_mode_peer = 1;
  uint64_t field_mask;
  const void* address;
  int err_mode;
  void (*err_handler)(void* arg, Endpoint*, Status);
  void* err_arg;
  uint64_t others[32];  // not set
};

struct TagInfo {
  uint64_t sender_tag;
  size_t length;
};

struct RequestParams {
  static constexpr uint32_t has_callback = 1 << 1, has_user_data = 1 << 2, has_flags = 1 << 4;
  static constexpr uint32_t close_by_force = 1 << 0;
  uint32_t op_attr_mask;
  uint32_t flags;
  void* request;
  union {
    void (*send)(void* request, Status, void* user_data);
    void (*recv)(void* request, Status, const TagInfo*, void* user_data);
  } callback;
  uint64_t datatype;
  void* user_data;
  uint64_t others[32];  // not set
};

// What calls return: null is done, an error is an address at the very end, all else a request.
inline bool is_error(const void* result) {
  return reinterpret_cast<uintptr_t>(result) >= static_cast<uintptr_t>(static_cast<intptr_t>(lowest_status));
}
inline Status status_of(const void* result) {
  return static_cast<Status>(reinterpret_cast<intptr_t>(result));
}

// The functions of the opened library. Names as UCX has them, without their prefix.
struct Library {
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
  Status (*config_read)(const char* prefix, const char* file, Config**);
  Status (*config_modify)(Config*, const char* name, const char* value);
  void (*config_release)(Config*);
  Status (*init_version)(unsigned major, unsigned minor, const ContextParams*, const Config*, Context**);
  void (*cleanup)(Context*);
  Status (*worker_create)(Context*, const WorkerParams*, Worker**);
  void (*worker_destroy)(Worker*);
  Status (*worker_get_address)(Worker*, void** address, size_t* nbytes);
  void (*worker_release_address)(Worker*, void* address);
  Status (*worker_get_efd)(Worker*, int* fd);
  Status (*worker_arm)(Worker*);
  unsigned (*worker_progress)(Worker*);
  Status (*ep_create)(Worker*, const EndpointParams*, Endpoint**);
  void* (*worker_flush_nbx)(Worker*, const RequestParams*);
  void* (*ep_close_nbx)(Endpoint*, const RequestParams*);
  void* (*tag_send_nbx)(Endpoint*, const void*, size_t count, uint64_t tag, const RequestParams*);
  void* (*tag_recv_nbx)(Worker*, void*, size_t count, uint64_t tag, uint64_t mask, const RequestParams*);
  void (*request_cancel)(Worker*, void* request);
  void (*request_free)(void* request);
  const char* (*status_string)(Status);

  std::string version() const;  // "1.22.0"

  // Opens the file, once per process, for good. Throws std::runtime_error where it cannot, or is too old.
  static const Library& open(const std::string& file);
};

// Throws std::runtime_error, which says `what` did not work, unless all is well.
void check(const Library& library, Status status, const std::string& what);

}  // namespace pycomm::ucx
