// collectives.cc -- the collectives of _C.Communicator, with the arguments that each needs beside the common
// ones (python_call.h).
#include "python_call.h"

namespace pycomm {

namespace method {

// (x, out, op)
PyObject* all_reduce(const PythonCall& call) {
  return call.submit(
      make_all_reduce(call.comm(), call.tensor(0), call.tensor(1), call.reduction(2), call.options()));
}

// (x, out, op, root)
PyObject* reduce(const PythonCall& call) {
  return call.submit(make_reduce(call.comm(), call.tensor(0), call.tensor(1), call.integer(3),
                                 call.reduction(2), call.options()));
}

// (list of x, out, op)
PyObject* reduce_scatter(const PythonCall& call) {
  return call.submit(
      make_reduce_scatter(call.comm(), call.tensors(0), call.tensor(1), call.reduction(2), call.options()));
}

// (x, out, op)
PyObject* reduce_scatter_flat(const PythonCall& call) {
  return call.submit(make_reduce_scatter_flat(call.comm(), call.tensor(0), call.tensor(1), call.reduction(2),
                                              call.options()));
}

// (x, root)
PyObject* broadcast(const PythonCall& call) {
  return call.submit(make_broadcast(call.comm(), call.tensor(0), call.integer(1), call.options()));
}

// (x, list of out)
PyObject* all_gather(const PythonCall& call) {
  return call.submit(make_all_gather(call.comm(), call.tensor(0), call.tensors(1), call.options()));
}

// (x, out)
PyObject* all_gather_flat(const PythonCall& call) {
  return call.submit(make_all_gather_flat(call.comm(), call.tensor(0), call.tensor(1), call.options()));
}

// (list of x, list of out)
PyObject* all_to_all(const PythonCall& call) {
  return call.submit(make_all_to_all(call.comm(), call.tensors(0), call.tensors(1), call.options()));
}

// (x, out, splits of x, splits of out)
PyObject* all_to_all_flat(const PythonCall& call) {
  return call.submit(make_all_to_all_flat(call.comm(), call.tensor(0), call.tensor(1),
                                          {call.integers(2), call.integers(3)}, call.options()));
}

// (x, list of out, root)
PyObject* gather(const PythonCall& call) {
  return call.submit(
      make_gather(call.comm(), call.tensor(0), call.tensors(1), call.integer(2), call.options()));
}

// (out, list of x, root)
PyObject* scatter(const PythonCall& call) {
  return call.submit(
      make_scatter(call.comm(), call.tensors(1), call.tensor(0), call.integer(2), call.options()));
}

}  // namespace method

void bind_collectives(CommClass& comm) {
  add_method<&method::all_reduce>(comm, {"all_reduce", "aa", 3});
  add_method<&method::reduce>(comm, {"reduce", "aa", 4});
  add_method<&method::reduce_scatter>(comm, {"reduce_scatter", "la", 3});
  add_method<&method::reduce_scatter_flat>(comm, {"reduce_scatter_flat", "aa", 3});
  add_method<&method::broadcast>(comm, {"broadcast", "a", 2});
  add_method<&method::all_gather>(comm, {"all_gather", "al", 2});
  add_method<&method::all_gather_flat>(comm, {"all_gather_flat", "aa", 2});
  add_method<&method::all_to_all>(comm, {"all_to_all", "ll", 2});
  add_method<&method::all_to_all_flat>(comm, {"all_to_all_flat", "aa", 4});
  add_method<&method::gather>(comm, {"gather", "al", 3});
  add_method<&method::scatter>(comm, {"scatter", "al", 3});
}

}  // namespace pycomm
