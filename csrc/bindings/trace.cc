// trace.cc -- recording, spans and counters, as pycomm/trace/ and Communicator.statistics() use them.
#include "../torch/interpreter.h"
#include "../trace/recorder.h"
#include "bindings.h"

namespace pycomm {

namespace {

using trace::Recorder;

void add_cells(py::list& list, const trace::Counters& counters, bool messages_alone = false) {
  for (int kind = 0; kind < num_op_kinds; ++kind) {
    const auto of = static_cast<OpKind>(kind);
    if (messages_alone && of != OpKind::send && of != OpKind::recv) continue;
    for (int size = 0; size < trace::num_size_classes; ++size) {
      const trace::Cell& cell = counters.cell(kind, size);
      const uint64_t operations = cell.operations.load(std::memory_order_relaxed);
      if (operations == 0) continue;
      list.append(py::make_tuple(to_string(of), size, operations, cell.nbytes.load(std::memory_order_relaxed),
                                 cell.measured.load(std::memory_order_relaxed),
                                 cell.waiting_ns.load(std::memory_order_relaxed),
                                 cell.moving_ns.load(std::memory_order_relaxed)));
    }
  }
}

void begin(const std::string& folder, size_t ring_bytes) {
  try {
    WithoutGil no_gil;
    Recorder::instance().begin(folder, ring_bytes);
  } catch (const std::system_error& error) {
    PyErr_SetString(PyExc_OSError, error.what());
    throw py::error_already_set();
  }
}

}  // namespace

// (operation, size class, operations, bytes, measured, ns waiting, ns moving) of what is not 0.
py::object counters_of(Communicator& comm) {
  py::list host, device;
  add_cells(host, comm.counters());
  // Messages to ranks of this host are those of the group there; its other operations are parts of ours.
  if (HostsSide* hosts = comm.hosts_side()) add_cells(host, hosts->inside().counters(), true);
  add_cells(device, comm.device_counters());
  return py::make_tuple(host, device);
}

namespace {

// The counters of a group while it lives, for one who does not keep it alive.
class WatchedCounters {
 public:
  explicit WatchedCounters(const CommPtr& comm) : comm_(comm) {}
  py::object get() const {
    CommPtr comm = comm_.lock();
    if (!comm) return py::none();
    py::object found = counters_of(*comm);
    WithoutGil no_gil;  // this may be the last reference now
    comm.reset();
    return found;
  }

 private:
  const std::weak_ptr<Communicator> comm_;
};

}  // namespace

void bind_trace(py::module_& module) {
  py::class_<WatchedCounters>(module, "WatchedCounters")
      .def(py::init<const CommPtr&>())
      .def("get", &WatchedCounters::get);
  module.def("trace_begin", &begin);
  module.def("trace_end", [] {
    WithoutGil no_gil;
    Recorder::instance().end();
  });
  module.def("trace_active", [] { return Recorder::instance().active(); });
  module.def("trace_folder", [] { return Recorder::instance().folder(); });
  module.def("trace_generation", [] { return Recorder::instance().generation(); });
  module.def("trace_name", [](const std::string& text) { return Recorder::instance().name(text); });
  module.def("trace_axis", [](const std::string& group, const std::string& axis) {
    Recorder::instance().axis(group, axis);
  });
  module.def("trace_span", [](uint32_t name, uint64_t begin, uint64_t end, int64_t a, int64_t b, int64_t c) {
    Recorder::instance().span({name, begin, end, {a, b, c}});
  });
  module.def("measure", [](bool on) {
    if (on) trace::state.fetch_or(trace::timing);
    else trace::state.fetch_and(~trace::timing);
  });
  module.attr("trace_size_classes") = trace::num_size_classes;
}

}  // namespace pycomm
