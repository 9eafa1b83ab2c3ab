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

// Runs a call into Python, with the lock; what it raises becomes a std::exception.
template <class Call>
auto in_python(const Call& call) {
  const py::gil_scoped_acquire gil;
  try {
    return call();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {  // Ctrl-C
      error.restore();
      if (!keep_raised()) PyErr_Clear();
      throw std::runtime_error("interrupted");
    }
    const auto text = py::str(error.value()).cast<std::string>();
    if (py::hasattr(error.value(), "lost_rank"))  // pycomm/hosts/meeting.py
      throw RankLost(error.value().attr("lost_rank").cast<int>(), text);
    throw std::runtime_error(text);
  }
}

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Function = std::shared_ptr<py::function>;

// () -> None, or (why the try has ended, the rank it is about or -1).
py::cpp_function look_of(const WireRequest& request) {
  return py::cpp_function([&request]() -> py::object {
    try {
      const py::gil_scoped_release no_gil;
      request.look();
    } catch (const CommError& error) {
      const std::string text = error.what(), what = "creating the group: ";
      const size_t start = text.find(what);
      return py::make_tuple(start == std::string::npos ? text : text.substr(start + what.size()),
                            error.kind == ErrorKind::peer ? error.peer : -1);
    }
    return py::none();
  });
}

Wires make_wires(const Function& engines, const StorePtr& store, const WireRequest& request) {
  const Placement& placement = request.placement;
  return in_python([&] {
    const auto [data, control] = (*engines)(store, request.rank, placement.host_of, placement.names,
                                            request.attempt, request.timeout, look_of(request))
                                     .cast<std::pair<py::object, py::object>>();
    return Wires{wire_of(data), wire_of(control)};
  });
}

BackendPtr make_nccl(const Function& nccl, const StorePtr& store, const NcclRequest& request) {
  const Placement& placement = request.place.placement;
  return in_python([&] {
    const py::cpp_function look([&request] {
      py::gil_scoped_release no_gil;
      request.look();
    });
    return (*nccl)(store, request.rank, placement.host_of, placement.names, request.place.attempt,
                   request.timeout, request.device, look)
        .cast<BackendPtr>();
  });
}

Checks checks_by(const Function& checks) {
  const auto word = in_python([&] { return (*checks)().cast<std::string>(); });
  return word == "before" ? Checks::before : word == "off" ? Checks::off : Checks::beside;
}

}  // namespace

MakersWithStore makers_by(const py::tuple& engines) {
  const Function wires = shared(engines[0].cast<py::function>()),
                 nccl = shared(engines[1].cast<py::function>());
  const Checks checks = checks_by(shared(engines[2].cast<py::function>()));
  return [=](const StorePtr& store) {
    return Makers{[=](const WireRequest& request) { return make_wires(wires, store, request); },
                  [=](const NcclRequest& request) { return make_nccl(nccl, store, request); }, checks};
  };
}

}  // namespace pycomm
