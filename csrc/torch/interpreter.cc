// interpreter.cc -- see interpreter.h.
#include "interpreter.h"

#include <cxxabi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../transport/interrupt.h"

namespace pycomm {

namespace {

[[noreturn]] void hang() {
  for (;;) ::pause();
}

// Runs a call that takes the lock; hangs where Python ends the thread instead.
template <class Take>
void take_or_hang(const Take& take) {
#ifdef __GLIBCXX__
  try {
    take();
  } catch (abi::__forced_unwind&) {
    hang();
  }
#else
  take();
#endif
}

bool on_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

// What a handler has raised and nobody has been told. Only the main thread has one, with the lock held.
PyObject *raised_type = nullptr, *raised_value = nullptr, *raised_traceback = nullptr;

int raise_after_the_call(void*) { return raise_from_handler() ? -1 : 0; }

// True: a handler has raised.
bool run_signal_handlers() {
  if (python_ended() || !on_main_thread()) return false;
  const PyGILState_STATE state = PyGILState_Ensure();
  // While an error is on its way (the wait is part of a clean-up) the handlers wait, too.
  const bool raised = !raised_type && !PyErr_Occurred() && PyErr_CheckSignals() != 0;
  if (raised) keep_raised();
  PyGILState_Release(state);
  return raised;
}

}  // namespace

WithoutGil::~WithoutGil() {
  take_or_hang([this] { PyEval_RestoreThread(state_); });
}

WithoutGilIfHeld::WithoutGilIfHeld() {
  if (!python_ended() && PyGILState_Check()) without_.emplace();
}

void hang_if_python_ended() {
  if (PyGILState_GetThisThreadState() == nullptr) return;  // no Python below: nobody will take the lock
  take_or_hang([] { PyGILState_Release(PyGILState_Ensure()); });
}

void watch_signals() { set_interrupt_check(&run_signal_handlers); }

bool keep_raised() {
  if (!on_main_thread() || raised_type || !PyErr_Occurred()) return false;
  PyErr_Fetch(&raised_type, &raised_value, &raised_traceback);
  Py_AddPendingCall(&raise_after_the_call, nullptr);
  return true;
}

bool raise_from_handler() {
  if (!raised_type || !on_main_thread()) return false;
  PyErr_Restore(raised_type, raised_value, raised_traceback);
  raised_type = raised_value = raised_traceback = nullptr;
  return true;
}

}  // namespace pycomm
