// engines.cc -- see engines.h.
#include "engines.h"

#include "../hosts/ucx_wire.h"
#include "../torch/c10d_wire.h"
#include "../torch/interpreter.h"

namespace pycomm {

namespace {

// Freed with the interpreter's lock, from whatever thread.
std::shared_ptr<py::function> shared(py::function function) {
  return {new py::function(std::move(function)), [](py::function* held) {
            if (python_ended()) return;
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

// Of what engines() has made for one of the two.
std::shared_ptr<Wire> wire_of(const py::object& made) {
  if (made.is_none()) return nullptr;
  if (py::isinstance<UcxWire>(made)) return made.cast<std::shared_ptr<UcxWire>>();
  return std::make_shared<C10dWire>(made.cast<c10::intrusive_ptr<c10d::Backend>>());
}

}  // namespace

MakeWiresWithStore make_wires_by(py::function engines) {
  return [engines = shared(std::move(engines))](const c10::intrusive_ptr<c10d::Store>& store,
                                                const WireRequest& request) {
    const py::gil_scoped_acquire gil;
    const Placement& placement = request.placement;
    Wires wires;
    try {
      const auto [data, control] = (*engines)(store, request.rank, placement.host_of, placement.names,
                                              request.attempt, request.timeout)
                                       .cast<std::pair<py::object, py::object>>();
      wires.data = wire_of(data);
      wires.control = wire_of(control);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {  // Ctrl-C
        error.restore();
        if (!keep_raised()) PyErr_Clear();
        throw std::runtime_error("interrupted");
      }
      throw std::runtime_error(py::str(error.value()).cast<std::string>());
    }
    return wires;
  };
}

}  // namespace pycomm
