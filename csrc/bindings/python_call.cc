// python_call.cc -- see python_call.h.
#include "python_call.h"

#include <torch/csrc/autograd/python_variable.h>

#include <climits>
#include <stdexcept>

#include "../torch/device.h"
#include "../torch/interpreter.h"
#include "work.h"

namespace pycomm {

namespace {

constexpr int common_arguments = 4;  // result, async_op, algorithm, timeout

// The holder of a _C.Communicator. The caller's type check has passed: Python makes it for every method.
const CommPtr& comm_of(PyObject* self) {
  auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  if (!held.holder_constructed()) throw py::type_error("this Communicator has not been connected");
  return held.holder<CommPtr>();
}

// By type: what only says that it is a tensor (an object with another __class__) has none inside.
bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

bool is_list(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

bool only_tensors(PyObject* object, char kind) {
  if (kind == 'a') return is_tensor(object);
  if (!is_list(object)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i)
    if (!is_tensor(PySequence_Fast_GET_ITEM(object, i))) return false;
  return true;
}

// [Note: arrays of other libraries]
PyObject* call_with_tensors(const Signature& signature, PyObject* self, PyObject* const* args,
                            Py_ssize_t count) {
  static PyObject* call = nullptr;
  auto function = py::reinterpret_steal<py::object>(PyObject_GetAttrString(self, signature.name));
  if (!function) throw py::error_already_set();
  py::list arrays, rest;
  const auto num_arrays = static_cast<Py_ssize_t>(signature.arrays.size());
  for (Py_ssize_t i = 0; i < count; ++i) (i < num_arrays ? arrays : rest).append(py::handle(args[i]));
  return PyObject_CallFunctionObjArgs(imported(call, "pycomm.arrays", "call_with_tensors"), function.ptr(),
                                      py::str(signature.arrays).ptr(), arrays.ptr(), rest.ptr(), nullptr);
}

int64_t integer_of(PyObject* object) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow) throw std::invalid_argument("pycomm: an integer of this call does not fit into 64 bits");
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

py::object result_of(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// Names of reduce operations as Python keeps those in its sources: one object for each.
PyObject* const* interned_names() {
  static PyObject* names[num_reduce_ops] = {};
  if (!names[0])
    for (int i = num_reduce_ops - 1; i >= 0; --i)
      names[i] = PyUnicode_InternFromString(to_string(static_cast<ReduceOp>(i)));
  return names;
}

}  // namespace

PythonCall::PythonCall(PyObject* self, PyObject* const* args, Py_ssize_t count)
    : comm_(comm_of(self)), args_(args), count_(count) {}

const at::Tensor& PythonCall::tensor(int i) const { return THPVariable_Unpack(args_[i]); }

Tensors PythonCall::tensors(int i) const {
  PyObject* list = args_[i];
  Tensors tensors;
  tensors.reserve(PySequence_Fast_GET_SIZE(list));
  for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(list); ++k) {
    PyObject* item = PySequence_Fast_GET_ITEM(list, k);
    if (!is_tensor(item)) throw py::type_error("a list of arrays was changed during the call");
    tensors.push_back(THPVariable_Unpack(item));
  }
  return tensors;
}

int PythonCall::integer(int i) const {
  const int64_t value = integer_of(args_[i]);
  if (value < INT_MIN || value > INT_MAX)
    throw std::invalid_argument("pycomm: " + std::to_string(value) + " is no rank and no tag");
  return static_cast<int>(value);
}

std::vector<int64_t> PythonCall::integers(int i) const {
  std::vector<int64_t> values;
  if (args_[i] == Py_None) return values;
  const py::object list = result_of(PySequence_Fast(args_[i], "expected a list of integers"));
  for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(list.ptr()); ++k)
    values.push_back(integer_of(PySequence_Fast_GET_ITEM(list.ptr(), k)));
  return values;
}

Reduction PythonCall::reduction(int i) const {
  PyObject* const* names = interned_names();
  for (int k = 0; k < num_reduce_ops; ++k)
    if (args_[i] == names[k] && static_cast<ReduceOp>(k) != ReduceOp::premul_sum)
      return {static_cast<ReduceOp>(k), 1.0};
  static PyObject* reduction = nullptr;
  const py::object pair =
      result_of(PyObject_CallOneArg(imported(reduction, "pycomm.options", "reduction"), args_[i]));
  const auto [code, factor] = pair.cast<std::pair<int, double>>();
  return {static_cast<ReduceOp>(code), factor};
}

bool PythonCall::async_op() const {
  const int truth = PyObject_IsTrue(tail(3));
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

Algorithm PythonCall::algorithm() const {
  if (tail(2) == Py_None) return Algorithm::automatic;
  static PyObject* algorithm_code = nullptr;
  return static_cast<Algorithm>(integer_of(
      result_of(PyObject_CallOneArg(imported(algorithm_code, "pycomm.options", "algorithm_code"), tail(2)))
          .ptr()));
}

double PythonCall::seconds() const {
  if (tail(1) == Py_None) return 0;
  static PyObject* seconds = nullptr;
  return result_of(PyObject_CallOneArg(imported(seconds, "pycomm.options", "seconds"), tail(1)))
      .cast<double>();
}

PyObject* PythonCall::submit(Request request) const {
  const bool async_op = this->async_op();
  std::shared_ptr<Work> work;
  {
    WithoutGil no_gil;
    if (request.device.is_cuda()) {
      work = issue_on_device(*comm_, std::move(request), async_op);
    } else if (!async_op) {
      TensorTask task(*comm_, std::move(request));
      comm_->run(task);
    } else {
      auto task = std::make_shared<TensorTask>(*comm_, std::move(request));
      comm_->issue(task);
      work = std::move(task);
    }
  }
  return async_op ? handle(std::move(work)) : result();
}

PyObject* PythonCall::handle(std::shared_ptr<Work> work, int source) const {
  return make_work({comm_, std::move(work), source}, tail(4));
}

void add_method(CommClass& comm, PyMethodDef* definition) {
  PyObject* method = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(comm.ptr()), definition);
  comm.attr(definition->ml_name) = result_of(method);
}

PyObject* call_method(const Signature& signature, Body body, PyObject* self, PyObject* const* args,
                      Py_ssize_t count) {
  try {
    if (count != signature.arguments + common_arguments)
      throw py::type_error(std::string(signature.name) + " takes " +
                           std::to_string(signature.arguments + common_arguments) + " arguments, got " +
                           std::to_string(count));
    for (size_t i = 0; i < signature.arrays.size(); ++i)
      if (!only_tensors(args[i], signature.arrays[i])) return call_with_tensors(signature, self, args, count);
    return body(PythonCall(self, args, count));
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

// By a function of pybind11's, which knows the translators of all modules.
void set_python_error() {
  thread_local std::exception_ptr under_way;
  under_way = std::current_exception();
  static PyObject* raise = nullptr;
  if (!raise)
    raise =
        py::cpp_function([] { std::rethrow_exception(std::exchange(under_way, nullptr)); }).release().ptr();
  Py_XDECREF(PyObject_CallNoArgs(raise));
}

PyObject* imported(PyObject*& kept, const char* module, const char* name) {
  if (!kept) kept = py::object(py::module_::import(module).attr(name)).release().ptr();
  return kept;
}

}  // namespace pycomm
