// faults.h -- what went wrong in a group, and whom it is told.
//
// [Note: how errors come back] Kernels write what went wrong into the error word in host memory and end. The
// watching thread and every call on the group read it there. The next call on the group, or on a work of it,
// throws. A mismatch is thrown once and the group goes on, unless the operation ran in stream order (but for
// messages among threads on one device); everything else breaks the group, on all ranks.
//
// All of it is guarded by the group's lock (lock.h), which the caller holds.
#pragma once

#include <exception>
#include <string>

#include "events.h"
#include "host_words.h"

namespace pycomm::cuda {

class Faults {
 public:
  Faults(const Setup& setup, const HostWords& words) : setup_(setup), words_(words) {}

  bool broken() const { return setup_.comm.transport().broken(); }
  // Reads what the kernels have written since the last time.
  void read();
  // Breaks the group for all ranks.
  void note(ErrorKind kind, const OpInfo& info, int peer, const std::string& text);
  // From now on every look() throws.
  void note_closed() { closed_ = true; }
  bool closed() const { return closed_; }

  // Throws what went wrong since the last look, or what has broken the group; `info`: of the call that looks.
  void look(const OpInfo& info);
  void rethrow();
  // What an operation that has ended did wrong; nullptr: nothing. take_of() also forgets a mismatch, which is
  // thrown once; so does forget(), for an error that was thrown elsewhere.
  std::exception_ptr of(const OpInfo& info) const;
  std::exception_ptr take_of(const OpInfo& info);
  void forget(const std::exception_ptr& error);

  // Has the device come to this event? True also where it never will: the driver says that a kernel or the
  // device has failed, which breaks the group.
  bool reached(const EventPtr& event);

 private:
  void read_record(ErrorRecord& record, OpKind message);
  void note_mismatch(const ErrorRecord& seen, const OpInfo& info);

  const Setup& setup_;
  const HostWords& words_;
  std::exception_ptr failure_;
  OpInfo failed_{};  // the operation that failure_ belongs to
  bool closed_ = false;
};

// "rank 2", "ranks 1, 3": of a mask with bit r for rank r.
std::string names_of(uint32_t ranks);

}  // namespace pycomm::cuda
