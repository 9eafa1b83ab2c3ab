// communicator.cc -- _C.Communicator: what it is, and its end. Its operations are in collectives.cc,
// messages.cc and registered.cc.
#include "../arithmetic/reduce.h"
#include "../collectives/select.h"
#include "../cuda/plan.h"
#include "../hosts/across.h"
#include "../hosts/ucx_wire.h"
#include "../torch/c10d_wire.h"
#include "../torch/device.h"
#include "../torch/interpreter.h"
#include "../torch/shrink.h"
#include "bindings.h"
#include "engines.h"

namespace pycomm {

namespace {

bool has_any_algorithm(OpKind kind, Algorithm algorithm) {
  return has_algorithm(kind, algorithm) || cuda::has_cuda_algorithm(kind, algorithm);
}

// Names, so that PYCOMM_ALGORITHM passes through unchanged.
void set_algorithm(Communicator& comm, const std::string& op, const std::string& algorithm) {
  for (int k = 0; k < num_op_kinds; ++k)
    for (int a = 0; a < num_algorithms; ++a) {
      const auto kind = static_cast<OpKind>(k);
      const auto choice = static_cast<Algorithm>(a);
      if (op == to_string(kind) && algorithm == to_string(choice) && has_any_algorithm(kind, choice))
        return comm.set_default_algorithm(kind, choice);
    }
  throw std::invalid_argument("pycomm: PYCOMM_ALGORITHM: " + op + " has no algorithm " + algorithm);
}

// What carries the bytes between hosts; None where there is but one.
py::object engine_of(Communicator& comm) {
  auto* across = dynamic_cast<Across*>(comm.hosts_side());
  if (!across) return py::none();
  if (const auto* ucx = dynamic_cast<const UcxWire*>(&across->wire()))
    return py::str("ucx " + ucx->version());
  return py::str(dynamic_cast<const C10dWire*>(&across->wire()) ? "gloo" : "threads");
}

py::dict describe(const CommPtr& comm) {
  Transport& t = comm->transport();
  const char* reaches[] = {"staging only", "process_vm_readv", "pointers (ranks are threads of one process)"};
  py::dict facts;
  facts["name"] = t.name();
  facts["rank"] = comm->rank();
  facts["world_size"] = comm->world_size();
  facts["hosts"] = comm->hosts_side() ? py::object(py::str(comm->hosts_side()->describe())) : py::none();
  facts["wire"] = engine_of(*comm);
  facts["reach"] = reaches[static_cast<int>(t.reach())];
  facts["cores"] = t.cores();
  const double hand_off = t.hand_off().seconds();
  facts["hand_off_ns"] = hand_off < 0 ? py::object(py::none()) : py::cast(hand_off * 1e9);
  facts["kernel_ahead"] = t.hand_off().kernel_ahead(~uint64_t{0});  // from the next operation on
  facts["oversubscribed"] = t.oversubscribed();
  facts["threads"] = t.lanes();
  facts["staging_bytes"] = t.budget_bytes();
  facts["simd"] = simd_level();
  facts["table"] = tuned_table(t).empty() ? "built-in" : "measured on this machine";
  facts["broken"] = t.broken();
  facts["cuda"] = py::none();
  if (const auto* group = cuda::group_of(*comm)) {
    py::dict cuda;
    for (const auto& [name, value] : group->describe()) cuda[py::str(name)] = value;
    facts["cuda"] = cuda;
  }
  return facts;
}

}  // namespace

void bind_communicator(py::module_& module) {
  CommClass comm(module, "Communicator");
  // Where the group's own store may be gone; see connect in store.cc.
  py::class_<PageStore, std::shared_ptr<PageStore>>(module, "PageStore");
  comm.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def_property_readonly("timeout", [](Communicator& c) { return c.transport().timeout(); })
      .def("set_timeout", [](Communicator& c, double timeout) { c.transport().set_timeout(timeout); })
      .def("set_algorithm", &set_algorithm)
      .def("describe", &describe)
      .def("counters", &counters_of)
      // For whoever waits for the others outside of an operation. Raises where one has died.
      .def("look_at_lives",
           [](Communicator& c) {
             WithoutGil no_gil;
             c.look_at_lives();
           })
      // The rank keeps them waiting for too long: all raise it.
      .def("fail_late",
           [](Communicator& c, int peer, const std::string& text) {
             WithoutGil no_gil;
             c.transport().mark_broken({ErrorKind::timeout, {}, peer, text});
             c.look_at_lives();
           })
      .def("abort",
           [](Communicator& c, const std::string& reason) {
             WithoutGil no_gil;
             c.abort(reason);
           })
      .def("close",
           [](Communicator& c) {
             WithoutGil no_gil;
             return c.close_and_report();
           })
      .def("shrink",
           [](const CommPtr& self, const std::vector<int>& exclude, double timeout) {
             WithoutGil no_gil;
             Shrunk shrunk = shrink(self, exclude, false, timeout);
             return std::make_pair(std::move(shrunk.comm), std::move(shrunk.ranks));
           })
      .def_property_readonly("point", &point_of)
      // Of a group that takes the place of this one.
      .def("successor_options",
           [](Communicator& c, const std::string& name, double timeout) {
             TransportOptions options = c.transport().options();
             options.name = name;
             options.timeout = timeout;
             options.staging_bytes = c.transport().budget_bytes();
             options.whole = {};
             options.place.clear();
             return options;
           })
      .def("pages",
           [](const CommPtr& self) { return std::make_shared<PageStore>(self->shared_transport()); });
  bind_collectives(comm);
  bind_messages(comm);
  bind_registered(comm);
}

}  // namespace pycomm
