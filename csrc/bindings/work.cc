// work.cc -- see work.h. A type written against Python's own interface: [Note: why not pybind11] in
// python_call.h.
#include "work.h"

#include <structmember.h>

#include <new>

#include "../communicator/messages.h"
#include "../torch/interpreter.h"
#include "python_call.h"

namespace pycomm {

namespace {

struct WorkObject {
  PyObject_HEAD PyObject* weak_references;
  PyObject* result;
  Handle handle;
};

WorkObject* object_of(PyObject* self) { return reinterpret_cast<WorkObject*>(self); }

// wait(seconds), 0: the operation's own limit
PyObject* wait(PyObject* self, PyObject* limit) {
  try {
    const double seconds = PyFloat_AsDouble(limit);
    if (seconds == -1 && PyErr_Occurred()) return nullptr;
    WithoutGil no_gil;
    object_of(self)->handle.work->wait(seconds);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  return Py_NewRef(object_of(self)->result);
}

PyObject* done(PyObject* self, PyObject*) {
  bool done = false;
  try {
    WithoutGil no_gil;
    done = object_of(self)->handle.work->poll();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  return PyBool_FromLong(done);
}

PyObject* source(PyObject* self, PyObject*) { return PyLong_FromLong(source_of(object_of(self)->handle)); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(object_of(self)->result);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(object_of(self)->result);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  WorkObject* work = object_of(self);
  if (work->weak_references) PyObject_ClearWeakRefs(self);
  Py_CLEAR(work->result);
  work->handle.~Handle();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {{"_wait", &wait, METH_O, nullptr},
                         {"_done", &done, METH_NOARGS, nullptr},
                         {"_source", &source, METH_NOARGS, nullptr},
                         {}};

PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(WorkObject, weak_references), READONLY, nullptr},
    {"_result", T_OBJECT, offsetof(WorkObject, result), READONLY, nullptr},
    {}};

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                       {Py_tp_methods, methods},
                       {Py_tp_members, members},
                       {}};

PyType_Spec spec{
    "pycomm._C.Work", sizeof(WorkObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

int source_of(const Handle& handle) {
  auto* message = dynamic_cast<MessageWork*>(handle.work.get());
  return message ? message->source() : handle.source;
}

PyObject* make_work(Handle handle, PyObject* result) {
  static PyObject* work_class = nullptr;
  auto* type = reinterpret_cast<PyTypeObject*>(imported(work_class, "pycomm.communicator", "Work"));
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) throw py::error_already_set();
  WorkObject* work = object_of(self);
  new (&work->handle) Handle(std::move(handle));
  work->result = Py_NewRef(result);
  return self;
}

void bind_work(py::module_& module) {
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) throw py::error_already_set();
  module.attr("Work") = py::reinterpret_steal<py::object>(type);
}

}  // namespace pycomm
