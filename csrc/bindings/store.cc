// store.cc -- _C.LocalStore, _C.TransportOptions and _C.connect: how a group comes together.
#include <optional>
#include <utility>

#include "../hosts/loop_wire.h"
#include "../torch/connect.h"
#include "../torch/interpreter.h"
#include "../torch/torch_store.h"
#include "../transport/page_store.h"
#include "../transport/watched_store.h"
#include "bindings.h"
#include "engines.h"

namespace pycomm {

namespace {

// The group of which the new one is a part, if there is one, and its ranks in the order of the new group.
using Origin = std::pair<CommPtr, std::vector<int>>;

// The members that are on this host, as the transport of the known group counts them; -1: on another.
std::vector<int> local_members(const Origin& origin) {
  const HostsSide* hosts = origin.first->hosts_side();
  std::vector<int> members;
  for (int rank : origin.second) members.push_back(hosts ? hosts->local(rank) : rank);
  return members;
}

CommPtr connect_without_gil(Store& store, int rank, int world_size, const TransportOptions& options,
                            const std::optional<Origin>& origin, const Makers& makers) {
  WithoutGil no_gil;
  if (!origin) return connect(store, rank, world_size, options, makers);
  WatchedStore watched(store, origin->first->transport(), local_members(*origin), origin->second,
                       {options.name, rank, world_size, {}});
  return connect(watched, rank, world_size, options, makers);
}

// Ranks that are threads of one process, on hosts that are only said to be several.
MakeWires loop_wires(const LocalStore& store) {
  return [&store](const WireRequest& request) {
    const int rank = request.rank, host = request.placement.host_of[rank];
    const int size = request.placement.world_size(), hosts = request.placement.hosts();
    auto network = [&](const char* name, int n) {
      return LoopNetwork::named(request.attempt + name, n, store.wire_delay_us);
    };
    Wires wires{network("/data", size)->wire(rank), nullptr};
    if (request.placement.ranks[host][0] == rank) wires.control = network("/control", hosts)->wire(host);
    return wires;
  };
}

// signature of the call from Python
TransportOptions transport_options(const std::string& name, double timeout, size_t staging_bytes,
                                   const std::string& host_id, bool use_cma, int threads,
                                   const std::string& cuda_protocol, int cuda_connections,
                                   size_t cuda_staging_bytes, const TunedRows* tuned, double host_timeout) {
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
  options.host_timeout = host_timeout;
  options.device = {cuda_staging_bytes, cuda_protocol, cuda_connections};
  if (tuned) options.write_note = note_of(tuned->rows);
  return options;
}

}  // namespace

void bind_store(py::module_& module) {
  py::class_<LocalStore, std::shared_ptr<LocalStore>>(module, "LocalStore")
      .def(py::init<int>(), py::arg("wire_delay_us") = 0);
  module.def("transport_options", &transport_options);
  py::class_<TransportOptions>(module, "TransportOptions");
  module.def("connect", [](LocalStore& store, int rank, int n, const TransportOptions& options,
                           const std::optional<Origin>& origin, const py::object&) {
    return connect_without_gil(store, rank, n, options, origin, {loop_wires(store), {}});
  });
  module.def("connect", [](PageStore& store, int rank, int n, const TransportOptions& options,
                           const std::optional<Origin>& origin, const py::object&) {
    return connect_without_gil(store, rank, n, options, origin, {});
  });
  module.def("connect", [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int n,
                           const TransportOptions& options, const std::optional<Origin>& origin,
                           const py::tuple& engines) {
    TorchStore adapter(store);
    return connect_without_gil(adapter, rank, n, options, origin, makers_by(engines)(store));
  });
}

}  // namespace pycomm
