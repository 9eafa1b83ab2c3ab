// interpreter.h -- Python around a call that waits: its lock (the GIL), its end, and its signals.
//
// [Note: Python's lock] A thread that waits for peers, or for a thread of the group, must not hold it: the
// other may be about to free memory that Python owns, or to run a callback. That goes for destructors, too.
//
// [Note: the end of the interpreter] From the moment at which Python begins to end, a thread that asks for
// the lock is not given it: up to 3.13 the thread is ended by pthread_exit, which runs the destructors on its
// stack without the lock and ends the process (std::terminate) at the first that may not throw; from 3.14 on
// it hangs. Ours hang on all versions, since the process is ending anyway.
//
// That does not help a thread that runs Python code, which gives the lock back and takes it again all the
// time: there, the stack that is taken down has frames of Python and of torch. So a thread of the group's own
// enters Python (to run a callback, to free a tensor) only while the interpreter has not begun to end
// (PythonStay), and the end (a function of `atexit`) waits for those that are inside, for at most
// `longest_stay`. What comes later is left alone for ever: no callback is run, no tensor freed.
//
// [Note: Ctrl-C] Python's handlers of signals run in the main thread, between two steps of its program: not
// while a call into C++ waits. So waits of the main thread ask every 50 ms (transport/interrupt.h) for
// handlers that want to run. If one raises, as that of Ctrl-C does, the group is aborted, the call ends with
// a CommError as after any abort, and where that becomes a Python error, the handler's own takes its place.
// Should the call end otherwise, the handler's error is raised right after it.
#pragma once

#include <torch/csrc/python_headers.h>

#include <chrono>
#include <optional>

namespace pycomm {

// Lets go of Python's lock, which this thread holds, until the end of the scope.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// The same where this thread may hold the lock or not.
class WithoutGilIfHeld {
 public:
  WithoutGilIfHeld();

 private:
  std::optional<WithoutGil> without_;
};

// Python is ending or has ended.
inline bool python_ended() { return !Py_IsInitialized(); }

// Keeps the interpreter from ending while a thread of the group's own is in Python; to nothing, if it has
// begun to end. [Note: the end of the interpreter].
class PythonStay {
 public:
  PythonStay();
  ~PythonStay();
  PythonStay(const PythonStay&) = delete;
  explicit operator bool() const { return inside_; }

 private:
  const bool inside_;
};
// From now on no thread enters Python. Waits until those that are inside have left; false: some have not
// within `longest_stay`. Without the lock.
inline constexpr std::chrono::seconds longest_stay{30};
bool end_python_stays();

// For a call that waits and returns to code of others that takes the lock: its end hangs where this is not
// possible any more, [Note: the end of the interpreter].
void hang_if_python_ended();
struct HangIfPythonEnded {
  ~HangIfPythonEnded() {
    if (python_ended()) hang_if_python_ended();
  }
};

// From now on waits of the main thread run Python's signal handlers, [Note: Ctrl-C].
void watch_signals();
// Keeps what a handler has raised in Python code that was called from a wait, as if it had run in the wait.
// False: nothing, or this is no main thread. With the lock held.
bool keep_raised();
// Raises in Python what a handler has raised in a wait. False: none has. With the lock held.
bool raise_from_handler();

}  // namespace pycomm
