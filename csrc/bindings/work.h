// work.h -- _C.Work, the handle of an operation under way that Python holds. pycomm.Work is a class over it
// (pycomm/communicator.py), whose methods call these.
#pragma once

#include "bindings.h"

namespace pycomm {

// A work and the group it belongs to, which must outlive its operations.
struct Handle {
  CommPtr comm;
  std::shared_ptr<Work> work;
  int source = -1;  // of a recv on a device, where it is known beforehand
};

// The rank that a completed recv came from.
int source_of(const Handle& handle);

// A new pycomm.Work, whose wait() returns `result`.
PyObject* make_work(Handle handle, PyObject* result);

}  // namespace pycomm
