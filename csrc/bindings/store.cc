// store.cc -- _C.LocalStore, _C.TransportOptions and _C.connect: how a group comes together.
#include <optional>
#include <utility>

#include "../torch/connect.h"
#include "../torch/interpreter.h"
#include "../torch/torch_store.h"
#include "../transport/watched_store.h"
#include "bindings.h"

namespace pycomm {

namespace {

// The group of which the new one is a part, if there is one, and its ranks in the order of the new group.
using Origin = std::pair<CommPtr, std::vector<int>>;

CommPtr connect_without_gil(Store& store, int rank, int world_size, const TransportOptions& options,
                            const std::optional<Origin>& origin) {
  WithoutGil no_gil;
  if (!origin) return connect(store, rank, world_size, options);
  WatchedStore watched(store, origin->first->transport(), origin->second, {options.name, rank, world_size});
  return connect(watched, rank, world_size, options);
}

// signature of the call from Python
TransportOptions transport_options(const std::string& name, double timeout, size_t staging_bytes,
                                   const std::string& host_id, bool use_cma, int threads,
                                   const std::string& cuda_protocol, int cuda_connections,
                                   size_t cuda_staging_bytes, const TunedRows* tuned) {
  if (!(timeout > 0 && timeout <= longest_timeout))  // nan, too
    throw std::invalid_argument("pycomm: timeout=" + std::to_string(timeout) +
                                ": must be a number of seconds above 0 and at most 1e8");
  TransportOptions options;
  options.name = name;
  options.timeout = timeout;
  options.staging_bytes = staging_bytes;
  options.host_id = host_id;
  options.use_cma = use_cma;
  options.threads = threads;
  options.device = {cuda_staging_bytes, cuda_protocol, cuda_connections};
  if (tuned) options.write_note = note_of(tuned->rows);
  return options;
}

}  // namespace

void bind_store(py::module_& module) {
  py::class_<LocalStore, std::shared_ptr<LocalStore>>(module, "LocalStore").def(py::init<>());
  module.def("transport_options", &transport_options);
  py::class_<TransportOptions>(module, "TransportOptions");
  module.def("connect", [](LocalStore& store, int rank, int n, const TransportOptions& options,
                           const std::optional<Origin>& origin) {
    return connect_without_gil(store, rank, n, options, origin);
  });
  module.def("connect", [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int n,
                           const TransportOptions& options, const std::optional<Origin>& origin) {
    TorchStore adapter(store);
    return connect_without_gil(adapter, rank, n, options, origin);
  });
}

}  // namespace pycomm
