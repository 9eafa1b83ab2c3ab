// ucx_api.cc -- see ucx_api.h.
#include "ucx_api.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
#include <stdexcept>

namespace pycomm::ucx {

namespace {

template <class Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (!function) throw std::runtime_error(std::string("it has no ") + name);
}

Library load(const std::string& file) {
  void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!handle) throw std::runtime_error(::dlerror());
  Library library;
  find(handle, "ucp_get_version", library.get_version);
  unsigned major = 0, minor = 0, release = 0;
  library.get_version(&major, &minor, &release);
  if (major > api_major)
    throw std::runtime_error("it is UCX " + library.version() + ", another interface than " +
                             std::to_string(api_major) + "." + std::to_string(api_minor) + " and later");
  if (major < api_major || minor < api_minor)
    throw std::runtime_error("it is UCX " + library.version() + ", which is too old");
  find(handle, "ucp_config_read", library.config_read);
  find(handle, "ucp_config_modify", library.config_modify);
  find(handle, "ucp_config_release", library.config_release);
  find(handle, "ucp_init_version", library.init_version);
  find(handle, "ucp_cleanup", library.cleanup);
  find(handle, "ucp_worker_create", library.worker_create);
  find(handle, "ucp_worker_destroy", library.worker_destroy);
  find(handle, "ucp_worker_get_address", library.worker_get_address);
  find(handle, "ucp_worker_release_address", library.worker_release_address);
  find(handle, "ucp_worker_get_efd", library.worker_get_efd);
  find(handle, "ucp_worker_arm", library.worker_arm);
  find(handle, "ucp_worker_progress", library.worker_progress);
  find(handle, "ucp_worker_flush_nbx", library.worker_flush_nbx);
  find(handle, "ucp_ep_create", library.ep_create);
  find(handle, "ucp_ep_close_nbx", library.ep_close_nbx);
  find(handle, "ucp_tag_send_nbx", library.tag_send_nbx);
  find(handle, "ucp_tag_recv_nbx", library.tag_recv_nbx);
  find(handle, "ucp_request_cancel", library.request_cancel);
  find(handle, "ucp_request_free", library.request_free);
  find(handle, "ucs_status_string", library.status_string);
  return library;
}

}  // namespace

std::string Library::version() const {
  unsigned major = 0, minor = 0, release = 0;
  get_version(&major, &minor, &release);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

const Library& Library::open(const std::string& file) {
  static std::mutex mutex;
  static std::optional<Library> opened;  // a process has one UCX: its memory hooks exist once
  std::lock_guard lock(mutex);
  if (!opened) opened = load(file);
  return *opened;
}

void check(const Library& library, Status status, const std::string& what) {
  if (status != ok)
    throw std::runtime_error("UCX " + library.version() + ": " + what + ": " + library.status_string(status));
}

}  // namespace pycomm::ucx
