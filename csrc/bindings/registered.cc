// registered.cc -- what kernels of others need that reach peers' memory: tensors in registered memory (empty,
// peer_addresses of _C.Communicator), a place among the group's operations (enter_line, leave_line), times in
// a trace (launch_begins, launch_ends).
#include "../torch/device.h"
#include "../torch/interpreter.h"
#include "../torch/registered_tensor.h"
#include "bindings.h"

namespace pycomm {

void bind_registered(CommClass& comm) {
  comm.def("empty",
           [](const CommPtr& c, const std::vector<int64_t>& shape, const py::object& dtype,
              const c10::Device& device) {
             const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
             WithoutGil no_gil;
             return empty_registered(c, shape, type, device);
           })
      .def("peer_addresses",
           [](Communicator& c, const at::Tensor& tensor) {
             WithoutGil no_gil;
             return peer_addresses(c, tensor);
           })
      .def("enter_line",
           [](Communicator& c, const c10::Device& device) {
             WithoutGil no_gil;
             enter_line_on_device(c, device);
           })
      .def("leave_line",
           [](Communicator& c, const c10::Device& device) {
             WithoutGil no_gil;
             leave_line_on_device(c, device);
           })
      .def("launch_begins",
           [](Communicator& c, const c10::Device& device, uint64_t number) {
             WithoutGil no_gil;
             launch_begins_on_device(c, device, number);
           })
      .def("launch_ends", [](Communicator& c, const c10::Device& device) {
        WithoutGil no_gil;
        launch_ends_on_device(c, device);
      });
}

}  // namespace pycomm
