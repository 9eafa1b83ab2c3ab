// messages.cc -- send, recv and barrier of _C.Communicator.
#include "../torch/device.h"
#include "../torch/interpreter.h"
#include "python_call.h"
#include "work.h"

namespace pycomm {

namespace method {

// send and recv of (x, peer, tag).
struct Exchange {
  explicit Exchange(const PythonCall& call)
      : tensor(call.tensor(0)),
        options{call.integer(1), call.integer(2), call.seconds()},
        async_op(call.async_op()) {}

  template <class OnHost, class OnDevice>
  std::shared_ptr<Work> start(const OnHost& on_host, const OnDevice& on_device) const {
    WithoutGil no_gil;
    if (tensor.is_cuda()) return on_device();
    std::shared_ptr<Work> work = on_host();
    if (async_op) work->help();
    else work->wait();
    return work;
  }

  const at::Tensor& tensor;
  const MessageOptions options;
  const bool async_op;
};

PyObject* send(const PythonCall& call) {
  const Exchange x(call);
  auto work = x.start([&] { return send_tensor(call.comm(), x.tensor, x.options); },
                      [&] { return send_on_device(call.comm(), x.tensor, x.options, x.async_op); });
  return x.async_op ? call.handle(std::move(work)) : call.result();
}

// At once it returns the sender's rank.
PyObject* recv(const PythonCall& call) {
  const Exchange x(call);
  auto work = x.start([&] { return recv_tensor(call.comm(), x.tensor, x.options); },
                      [&] { return recv_on_device(call.comm(), x.tensor, x.options, x.async_op); });
  if (x.async_op) return call.handle(std::move(work), x.options.peer);
  return PyLong_FromLong(source_of({nullptr, std::move(work), x.options.peer}));
}

PyObject* barrier(const PythonCall& call) {
  if (!has_worked_on_device(call.comm()) || call.async_op())
    return call.submit(make_barrier(call.comm(), call.options()));
  const double timeout = call.seconds();
  bool met = false;
  {
    WithoutGil no_gil;
    met = barrier_on_device(call.comm(), timeout);
  }
  return met ? call.result() : call.submit(make_barrier(call.comm(), call.options()));
}

}  // namespace method

void bind_messages(CommClass& comm) {
  add_method<&method::send>(comm, {"send", "a", 3});
  add_method<&method::recv>(comm, {"recv", "a", 3});
  add_method<&method::barrier>(comm, {"barrier", "", 0});
  // For calls that consist of several operations: they raise such an error before the first one only.
  comm.def("raise_deferred_error", [](Communicator& c) {
    WithoutGil no_gil;
    c.raise_deferred_error();
  });
  comm.def("hold_deferred_errors",
           [](Communicator& c, bool hold) { c.background()->hold_deferred_errors(hold); });
}

}  // namespace pycomm
