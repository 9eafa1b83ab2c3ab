// bindings.h -- the parts of the Python module pycomm._C, one file each. They are thin: arguments to requests
// (torch/tensors.h), results to Python; every call that may wait releases the GIL.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "../collectives/tuned.h"
#include "../communicator/communicator.h"
#include "../torch/tensors.h"

namespace pycomm {

namespace py = pybind11;

using CommPtr = std::shared_ptr<Communicator>;
using CommClass = py::class_<Communicator, CommPtr>;

// What was measured on this machine (collectives/tuned.h), as Python hands it to a group.
struct TunedRows {
  std::vector<TunedRow> rows;
};

void bind_work(py::module_& module);
void bind_store(py::module_& module);
void bind_communicator(py::module_& module);
void bind_collectives(CommClass& comm);
void bind_messages(CommClass& comm);
void bind_registered(CommClass& comm);
void bind_explain(py::module_& module);
void bind_backend(py::module_& module);
void bind_trace(py::module_& module);
py::object counters_of(Communicator& comm);

}  // namespace pycomm
