// work.cc -- _C.Work, the handle of an operation under way.
#include "../collectives/send_recv.h"
#include "../torch/device.h"
#include "../torch/interpreter.h"
#include "bindings.h"

namespace pycomm {

std::optional<Handle> submit(const CommPtr& comm, Request request, bool async_op) {
  WithoutGil no_gil;
  if (request.device.is_cuda()) {
    auto work = issue_on_device(*comm, std::move(request), async_op);
    return async_op ? std::optional(Handle{comm, std::move(work)}) : std::nullopt;
  }
  auto task = std::make_shared<TensorTask>(*comm, std::move(request));
  if (!async_op) {
    comm->run(*task);
    return std::nullopt;
  }
  comm->issue(task);
  return Handle{comm, std::move(task)};
}

void bind_work(py::module_& module) {
  py::class_<Handle>(module, "Work")
      .def(
          "wait",
          [](Handle& self, double timeout) {
            WithoutGil no_gil;
            self.work->wait(timeout);
          },
          py::arg("timeout") = 0.0)
      .def("done",
           [](Handle& self) {
             WithoutGil no_gil;
             return self.work->poll();
           })
      .def("source", [](Handle& self) {
        auto* message = dynamic_cast<Message*>(self.work.get());
        return message ? message->source() : self.source;
      });
}

}  // namespace pycomm
