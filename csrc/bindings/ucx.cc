// ucx.cc -- _C.UcxContext and _C.UcxWire, which pycomm/hosts/ucx.py makes.
#include "ucx.h"

#include "../hosts/ucx_wire.h"
#include "../torch/interpreter.h"

namespace pycomm {

void bind_ucx(py::module_& module) {
  using Settings = std::vector<std::pair<std::string, std::string>>;
  using NoGil = py::call_guard<WithoutGil>;
  py::register_local_exception<WireError>(module, "WireError", PyExc_RuntimeError);
  module.attr("oldest_ucx") = std::pair(ucx::api_major, ucx::api_minor);
  py::class_<UcxContext, std::shared_ptr<UcxContext>>(module, "UcxContext")
      .def(py::init<const std::string&, const Settings&, int>(), py::arg("file"), py::arg("settings"),
           py::arg("peers"), NoGil())
      .def_property_readonly("version", [](const UcxContext& self) { return self.library().version(); });
  py::class_<UcxWire, std::shared_ptr<UcxWire>>(module, "UcxWire")
      .def(py::init<std::shared_ptr<UcxContext>, int, int, int>(), py::arg("context"), py::arg("rank"),
           py::arg("world_size"), py::arg("spins"), NoGil())
      .def_property_readonly("address", [](UcxWire& self) { return py::bytes(self.address()); })
      .def("connect", &UcxWire::connect, py::arg("addresses"), NoGil())
      .def("missing", &UcxWire::missing, NoGil())
      .def("close", &UcxWire::close, NoGil());
}

}  // namespace pycomm
