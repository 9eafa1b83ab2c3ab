// interpreter.cc -- see interpreter.h.
#include "interpreter.h"

#include <cxxabi.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>

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

// Of all threads. Each side writes its own word before it reads the other's (seq_cst), so that one sees the
// other.
std::atomic<int> stays{0};
std::atomic<bool> no_more_stays{false};
thread_local int stays_here = 0;  // a stay within another is as long as that one lets it be

[[maybe_unused]] const int in_children = ::pthread_atfork(nullptr, nullptr, [] { stays = stays_here; });

bool enter() {
  if (python_ended()) return false;
  stays.fetch_add(1);
  if (stays_here == 0 && no_more_stays.load()) {
    stays.fetch_sub(1);
    return false;
  }
  ++stays_here;
  return true;
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

PythonStay::PythonStay() : inside_(enter()) {}

PythonStay::~PythonStay() {
  if (!inside_) return;
  --stays_here;
  stays.fetch_sub(1);
}

bool end_python_stays() {
  no_more_stays.store(true);
  const auto limit = std::chrono::steady_clock::now() + longest_stay;
  while (stays.load() > stays_here && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return stays.load() <= stays_here;
}

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
