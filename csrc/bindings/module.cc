// module.cc -- the Python module pycomm._C: its constants, its errors, and its parts in order.
#include "../hosts/agree.h"
#include "../torch/interpreter.h"
#include "bindings.h"
#include "ucx.h"

namespace pycomm {

namespace {

// The Python classes are looked up when an error is raised.
void raise_in_python(const CommError& error) {
  if (raise_from_handler()) return;  // Ctrl-C has ended the call
  const char* names[] = {"CommError", "MismatchError", "PeerError", "CommTimeoutError", "AbortedError"};
  py::object cls = py::module_::import("pycomm.errors").attr(names[static_cast<int>(error.kind)]);
  py::object peer = error.peer >= 0 ? py::object(py::int_(error.peer)) : py::none();
  py::object op = error.op.kind != OpKind::none ? py::object(py::str(to_string(error.op.kind))) : py::none();
  py::object sequence = error.op.sequence ? py::object(py::int_(error.op.sequence)) : py::none();
  py::object value =
      cls(py::str(error.what()), py::arg("rank") = error.rank, py::arg("world_size") = error.world_size,
          py::arg("op") = op, py::arg("sequence") = sequence, py::arg("peer") = peer);
  PyErr_SetObject(cls.ptr(), value.ptr());
}

// pybind11 shares translators between modules, so this one also serves errors on their way through torch's
// own bindings.
void bind_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CommError& error) {
      raise_in_python(error);
    }
  });
}

// In csrc/torch/interpreter.h, [Note: the end of the interpreter].
void end_stays_at_exit() {
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    bool ended = false;
    {
      const WithoutGil no_gil;
      ended = end_python_stays();
    }
    if (!ended)
      py::module_::import("pycomm.env")
          .attr("logger")()
          .attr("warning")(
              "The program ends while a callback of an operation has been running for more than " +
              std::to_string(longest_stay.count()) + " s. Let callbacks return sooner.");
  }));
}

template <class Enum>
py::list names(int count) {
  py::list list;
  for (int i = 0; i < count; ++i) list.append(to_string(static_cast<Enum>(i)));
  return list;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  watch_signals();
  end_stays_at_exit();
  bind_errors();
  bind_work(module);
  bind_communicator(module);
  bind_store(module);
  bind_explain(module);
  module.attr("dtypes") = names<DType>(num_dtypes);
  module.attr("reduce_ops") = names<ReduceOp>(num_reduce_ops);
  module.attr("kinds") = names<OpKind>(num_op_kinds);
  module.attr("algorithms") = names<Algorithm>(num_algorithms);
  module.attr("slot_payload_bytes") = slot_payload_bytes;
  module.attr("card_payload") = card_payload;
  module.attr("longest_timeout") = longest_timeout;
  bind_backend(module);
  bind_ucx(module);
  bind_trace(module);
}

}  // namespace pycomm
