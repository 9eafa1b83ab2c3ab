// driver.cc -- see driver.h.
#include "driver.h"

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>

namespace pycomm::cuda {

namespace {

struct Loaded {
  Driver table;
  std::string problem;  // empty: usable
};

Loaded load() {
  Loaded loaded;
  if (!built_with_cuda()) {
    loaded.problem = "pycomm was built without CUDA. Install the CUDA toolkit (nvcc) and build it again.";
    return loaded;
  }
  std::string missing;
#define PYCOMM_CUDA_LOAD(name, version, parameters)                                                 \
  loaded.table.name = reinterpret_cast<decltype(loaded.table.name)>(driver_symbol(#name, version)); \
  if (!loaded.table.name && missing.empty())                                                        \
    missing = #name " of CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  PYCOMM_CUDA_DRIVER_FUNCTIONS(PYCOMM_CUDA_LOAD)
#undef PYCOMM_CUDA_LOAD
  if (!loaded.table.cuInit) {
    loaded.problem = "No CUDA driver was found on this machine (libcuda.so.1).";
  } else if (!missing.empty()) {
    loaded.problem = "The CUDA driver of this machine is too old: it has no " + missing + ". Update it.";
  } else if (int result = loaded.table.cuInit(0); result != result::success) {
    const char* name = nullptr;
    loaded.table.cuGetErrorName(result, &name);
    loaded.problem =
        std::string("cuInit failed: ") + (name ? name : "error ") + (name ? "" : std::to_string(result));
  }
  return loaded;
}

const Loaded& machine_driver() {
  static const Loaded loaded = load();
  return loaded;
}

std::atomic<const Driver*> replaced{nullptr};
std::mutex mutex;  // of contexts
std::map<Device, Context> contexts;

}  // namespace

const Driver* driver() {
  if (const Driver* table = replaced.load(std::memory_order_acquire)) return table;
  const Loaded& loaded = machine_driver();
  return loaded.problem.empty() ? &loaded.table : nullptr;
}

std::string driver_problem() {
  if (replaced.load(std::memory_order_acquire)) return "";
  return machine_driver().problem;
}

const Driver& require_driver() {
  const Driver* table = driver();
  if (!table) throw std::runtime_error(driver_problem());
  return *table;
}

void use_driver(const Driver* replacement) {
  std::lock_guard lock(mutex);
  replaced.store(replacement, std::memory_order_release);
  contexts.clear();
}

std::string describe_result(int result, const char* call) {
  const Driver* table = driver();
  const char *name = nullptr, *text = nullptr;
  if (table) {
    table->cuGetErrorName(result, &name);
    table->cuGetErrorString(result, &text);
  }
  return std::string(call) + " failed: " + (name ? name : "error " + std::to_string(result)) +
         (text ? " (" + std::string(text) + ")" : "");
}

void check(int result, const char* call) {
  if (result != result::success) throw std::runtime_error(describe_result(result, call));
}

Context primary_context(Device device) {
  const Driver& table = require_driver();
  std::lock_guard lock(mutex);
  if (auto found = contexts.find(device); found != contexts.end()) return found->second;
  Context context = nullptr;
  const int result = table.cuDevicePrimaryCtxRetain(&context, device);
  if (result == result::success) return contexts[device] = context;
  const char* name = nullptr;
  table.cuGetErrorName(result, &name);
  throw std::runtime_error("cuDevicePrimaryCtxRetain of device " + std::to_string(device) +
                           " failed: " + (name ? name : "error " + std::to_string(result)));
}

ContextGuard::ContextGuard(Device device) : driver_(require_driver()) {
  const Context wanted = primary_context(device);
  PYCOMM_CUDA_CHECK(driver_, cuCtxGetCurrent, &previous_);
  if (previous_ == wanted) return;
  PYCOMM_CUDA_CHECK(driver_, cuCtxSetCurrent, wanted);
  changed_ = true;
}

ContextGuard::~ContextGuard() {
  if (changed_) driver_.cuCtxSetCurrent(previous_);
}

Capture capture_of(Stream stream) {
  int status = flag::capture_none;
  uint64_t id = 0;
  PYCOMM_CUDA_CHECK(require_driver(), cuStreamGetCaptureInfo, stream, &status, &id, nullptr, nullptr, nullptr,
                    nullptr);
  return {status != flag::capture_none, status != flag::capture_none ? id : 0};
}

}  // namespace pycomm::cuda
