// registered.cc -- tensors in registered memory: empty and peer_addresses of _C.Communicator.
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
      .def("peer_addresses", [](Communicator& c, const at::Tensor& tensor) {
        WithoutGil no_gil;
        return peer_addresses(c, tensor);
      });
}

}  // namespace pycomm
