// python_call.h -- the calls of Python that communicate, written against Python's own calling convention.
//
// [Note: why not pybind11] An operation of 8 bytes takes 1 us; pybind11's dispatch, the checks of arguments
// in Python and a handle around a handle took as long again. So the methods of _C.Communicator that
// communicate are METH_FASTCALL: pycomm/communicator.py gives them all arguments by position,
//
//     arrays...  what the operation needs...  result  async_op  algorithm  timeout
//
// as the user gave them, and they are read here, the usual ones first. `result` is what the call returns, at
// once or from Work.wait().
//
// [Note: arrays of other libraries] Tensors of torch are taken as they are. If one of the arrays is of
// another library, the whole call goes to pycomm.arrays.call_with_tensors, which makes tensors over the same
// memory, enters the library's stream, and calls again.
#pragma once

#include <string_view>

#include "bindings.h"

namespace pycomm {

class PythonCall {
 public:
  PythonCall(PyObject* self, PyObject* const* args, Py_ssize_t count);

  Communicator& comm() const { return *comm_; }
  // Argument number i. What is wrong raises as in Python (py::error_already_set).
  const at::Tensor& tensor(int i) const;
  Tensors tensors(int i) const;
  int integer(int i) const;
  std::vector<int64_t> integers(int i) const;  // None: empty
  Reduction reduction(int i) const;

  bool async_op() const;
  CallOptions options() const { return {seconds(), algorithm()}; }
  double seconds() const;  // 0: None

  // What the method returns: a new reference.
  PyObject* submit(Request request) const;  // runs or issues it
  PyObject* handle(std::shared_ptr<Work> work, int source = -1) const;
  PyObject* result() const { return Py_NewRef(tail(4)); }

 private:
  PyObject* tail(int from_end) const { return args_[count_ - from_end]; }
  Algorithm algorithm() const;

  const CommPtr& comm_;
  PyObject* const* const args_;
  const Py_ssize_t count_;
};

// How a method is called. `arrays` says what its first arguments are, a letter for each: a(rray) or l(ist of
// arrays); `arguments` is how many there are before the common ones.
struct Signature {
  const char* name;
  std::string_view arrays;
  int arguments;
};
using Body = PyObject* (*)(const PythonCall& call);

// Calls the body, with its errors as Python's.
PyObject* call_method(const Signature& signature, Body body, PyObject* self, PyObject* const* args,
                      Py_ssize_t count);
void add_method(CommClass& comm, PyMethodDef* definition);

template <Body body>
Signature signature_of;
template <Body body>
PyObject* entry(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return call_method(signature_of<body>, body, self, args, count);
}
template <Body body>
void add_method(CommClass& comm, const Signature& signature) {
  // Python keeps the address, and takes all kinds of functions as one type.
  static PyMethodDef definition;
  signature_of<body> = signature;
  definition = {signature.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&entry<body>)),
                METH_FASTCALL, nullptr};
  add_method(comm, &definition);
}

// Makes the C++ exception under way Python's error. Call it in a catch clause.
void set_python_error();

// A name of a module of this package: imported when first asked for, never let go. With the lock held, which
// guards `kept`: one for each name.
PyObject* imported(PyObject*& kept, const char* module, const char* name);

}  // namespace pycomm
