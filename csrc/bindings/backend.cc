// backend.cc -- what Python sees of torch's backend (pycomm/torch_backend.py).
#include "../torch/backend.h"

#include <pybind11/chrono.h>

#include "../torch/interpreter.h"
#include "bindings.h"
#include "engines.h"

namespace pycomm {

namespace {

// signature of the call from Python
c10::intrusive_ptr<PycommBackend> create(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         double timeout, TransportOptions transport,
                                         const std::map<int, int>& algorithms,
                                         std::vector<uint64_t> global_ranks, const py::tuple& engines) {
  Algorithms by_kind{};
  for (auto [kind, algorithm] : algorithms) by_kind.at(kind) = static_cast<Algorithm>(algorithm);
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(std::min(timeout, longest_timeout)));
  auto options = c10::make_intrusive<PycommBackend::Options>(milliseconds, std::move(transport), by_kind,
                                                             makers_by(engines));
  options->group_name = options->transport.name;
  options->global_ranks_in_group = std::move(global_ranks);
  WithoutGil no_gil;
  return c10::make_intrusive<PycommBackend>(store, rank, size, std::move(options));
}

py::list sizes_of(const c10::SmallVector<RecordedTensor, 1>& tensors) {
  py::list list;
  for (const RecordedTensor& tensor : tensors)
    list.append(std::vector<int64_t>(tensor.sizes.begin(), tensor.sizes.end()));
  return list;
}

py::list dtypes_of(const c10::SmallVector<RecordedTensor, 1>& tensors) {
  py::list list;
  for (const RecordedTensor& tensor : tensors) list.append(c10::toString(tensor.dtype));
  return list;
}

py::list flight_records() {
  py::list list;
  for (const FlightRecord& record : FlightRecorder::instance().entries()) {
    py::dict entry;
    entry["id"] = record.id;
    entry["rank"] = record.group->rank;
    entry["group_id"] = record.group->id;
    entry["group_name"] = record.group->name;
    entry["group_desc"] = record.group->desc;
    entry["global_ranks"] = record.group->global_ranks;
    entry["name"] = record.name;
    entry["peer"] = record.peer;
    entry["is_p2p"] = record.is_p2p;
    entry["sequence"] = record.sequence;
    entry["timeout_ms"] = record.timeout_ms;
    entry["created_ns"] = record.created_ns;
    entry["completed_ns"] = record.completed_ns ? py::object(py::int_(record.completed_ns)) : py::none();
    entry["failed"] = record.failed;
    entry["input_sizes"] = sizes_of(record.inputs);
    entry["input_dtypes"] = dtypes_of(record.inputs);
    entry["output_sizes"] = sizes_of(record.outputs);
    entry["output_dtypes"] = dtypes_of(record.outputs);
    list.append(entry);
  }
  return list;
}

}  // namespace

void bind_backend(py::module_& module) {
  py::module_::import("torch.distributed");  // registers the base class
  py::class_<PycommBackend, c10d::Backend, c10::intrusive_ptr<PycommBackend>>(module, "Backend")
      .def_property_readonly("communicator", [](PycommBackend& self) { return self.communicator(); })
      .def_property_readonly("options", [](PycommBackend& self) { return self.getBackendOptions(); })
      .def("get_error", &PycommBackend::getError)
      .def("shrink_ahead", &PycommBackend::shrink_ahead)
      .def_property_readonly("shrunk_communicator",
                             [](PycommBackend& self) { return self.shrunk()->communicator(); })
      .def("_set_default_timeout", &PycommBackend::setTimeout, py::arg("timeout"))
      // torch calls it on the parent's backend where a new group leaves this rank out, if there is a bound
      // device.
      .def("perform_nocolor_split", [](PycommBackend&, const py::object&) {});
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const TorchCommError& error) {
      throw error.error();  // the translator in module.cc, which is asked next, knows CommError
    }
  });
  module.def("create_backend", &create);
  module.def("flight_records", &flight_records);
}

}  // namespace pycomm
