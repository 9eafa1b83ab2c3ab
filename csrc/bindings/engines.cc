// engines.cc -- see engines.h.
#include "engines.h"

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

}  // namespace

MakeWiresWithStore make_wires_by(py::function engines) {
  return [engines = shared(std::move(engines))](const c10::intrusive_ptr<c10d::Store>& store,
                                                const WireRequest& request) {
    const py::gil_scoped_acquire gil;
    const Placement& placement = request.placement;
    std::pair<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Backend>> made;
    try {
      made = (*engines)(store, request.rank, placement.host_of, placement.names, request.attempt,
                        request.timeout)
                 .cast<decltype(made)>();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {  // Ctrl-C
        error.restore();
        if (!keep_raised()) PyErr_Clear();
        throw std::runtime_error("interrupted");
      }
      throw std::runtime_error(py::str(error.value()).cast<std::string>());
    }
    Wires wires{std::make_shared<C10dWire>(std::move(made.first)), nullptr};
    if (made.second) wires.control = std::make_shared<C10dWire>(std::move(made.second));
    return wires;
  };
}

}  // namespace pycomm
