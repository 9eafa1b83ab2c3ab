// traced_message.h -- what the trace and the counters of a group have of one message, on one side of it.
#pragma once

#include "../communicator/communicator.h"

namespace pycomm {

class TracedMessage {
 public:
  TracedMessage(Communicator& comm, OpKind kind, uint64_t nbytes)
      : comm_(comm), subject_{kind, nbytes, 0, 0, trace::Type::message} {}

  void issued() {
    if (!trace::measuring()) return;
    times_.issued = times_.begun = trace::now_ns();
    trace::Recorder::instance().issued(times_, subject_, comm_.traced_as());
  }
  // By whoever matches it, before whoever ends it.
  void matched() {
    if (times_.measured()) times_.arrived = trace::now_ns();
  }
  void wait_begins() {
    if (times_.measured()) times_.wait_begins();
  }
  // peer: its number in the group of which it is told; below 0: unknown.
  void ended(uint64_t id, int peer, bool failed) {
    trace::Counters& counters = comm_.counters();
    if (!failed) counters.count_shared(subject_.kind, subject_.nbytes);
    if (!times_.measured()) return;
    trace::Times times = times_.at_end();
    times.last = peer < 0 ? trace::nobody : static_cast<uint16_t>(peer);
    trace::Subject subject = subject_;
    subject.sequence = id;
    if (!failed) counters.measure_shared(subject.kind, subject.nbytes, times);
    trace::Recorder::instance().ended(times, subject, comm_.traced_as(), failed);
  }

 private:
  Communicator& comm_;
  const trace::Subject subject_;
  trace::Times times_;
};

}  // namespace pycomm
