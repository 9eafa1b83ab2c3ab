// device_times.h -- when operations run on the device, for a trace.
//
//   caller's threads                                        device, one stream
//
//   TracedCall: issued ......................................
//   Issuer: waits for the line | begin | steps | end | mark   ---> | begin |  the operation  | end |
//   TracedCall: in the stream                                         ^                         ^
//     |                                                               +---- DeviceClock::read --+
//     v                                                                          |
//   DeviceTimes: pending, by stream  <--- watching thread: whose end has come?   v
//                                          Recorder: the same record again, with both times
//
// Only while a trace is recorded, and outside of graph captures, an operation has two events more in its
// stream, with times: one before its first step, behind what it waits for in its line, one after its last.
// What its kernels wait for peers lies between them. The times are those of the device's clock
// (device_clock.h). They go into the record of the operation (trace/record.h) together with the moment in
// which the host saw the end: an operation does not begin on the device before it was issued, nor end after
// somebody has seen its end, and from these bounds the reader finds out how the two clocks lie to each other.
//
// Which alternative lost: to convert to the host's time here. What is known of the two clocks at the first
// operations is worth little, both drift (10 us a second, say), and each correction would move later
// operations against earlier ones. The reader has the whole trace and bends one smooth line through it.
//
// The end is seen at the next look of the watching thread: 5 ms late at most, which is too much for that
// line. So some ends in each second are looked for every 200 us (wanted_soon()).
//
// What it costs: nothing without a trace but a load and a branch. With one, two records of events per
// operation on the host and two time stamps on the device, and in a part of each second looks every 200 us,
// until 64 ends were seen closely or 0.2 s are over. Nothing is waited for, and no stream is made: [Note:
// hardware queues] in budget.h. At most `most_pending` operations of a group are under way with times; those
// beyond have none. Where the driver refuses an event or a time, an operation has none and does not notice.
//
// An end of a trace asks for what has ended until then (trace/late.h); operations that end later
// stay without times.
//
// All of it is guarded by the group's lock (lock.h), which the caller holds; late() takes it.
#pragma once

#include <deque>
#include <map>
#include <memory>

#include "../trace/late.h"
#include "../trace/recorder.h"
#include "device_clock.h"
#include "lock.h"
#include "setup.h"

namespace pycomm::cuda {

class DeviceTimes final : trace::Late {
 public:
  DeviceTimes(const Setup& setup, GroupLock& lock);
  ~DeviceTimes();
  DeviceTimes(const DeviceTimes&) = delete;

  // An operation whose record is to have its times.
  struct Pending {
    EventPtr begin, end;
    trace::Times times;
    trace::Subject subject;
  };

  // Where the stream is now; nullptr: no times.
  EventPtr mark(Stream stream);
  void expect(Stream stream, Pending operation);
  // Records the times of those that have ended.
  void look();
  bool pending() const { return count_ > 0; }
  bool wanted_soon() const;  // the next look
  void close();  // looks for the last time, and gives all events back

 private:
  void late() override;
  void look_at(std::deque<Pending>& queue, bool closely);
  bool take(Pending& operation);  // false: it has not ended
  void forget();

  const Setup& setup_;
  GroupLock& lock_;
  std::shared_ptr<DeviceClock> clock_;  // while a trace goes on
  std::map<Stream, std::deque<Pending>> pending_;  // in the order of their ends
  size_t count_ = 0;
  uint64_t looked_ns_ = 0;
  uint64_t second_ns_ = 0;  // when the second began in which
  int closely_ = 0;  // what looks at short intervals have brought in it
};

// An operation while it is issued, or a launch of the caller's: counts it, records the host's side, from the
// call until all of it is in the stream, and asks for its times on the device. With the group's lock held.
class TracedCall {
 public:
  TracedCall(Communicator& comm, DeviceTimes& device, const trace::Subject& subject);
  ~TracedCall();
  TracedCall(const TracedCall&) = delete;

  // Before its first step in the stream, and behind its last.
  void begins(Stream stream, const Capture& capture);
  void ends(Stream stream);
  void done();  // all of it is in the stream; else it has failed

 private:
  void record(bool failed);

  Communicator& comm_;
  DeviceTimes& device_;
  const trace::Subject subject_;
  trace::Times times_;
  Stream stream_ = nullptr;
  EventPtr begin_, end_;
  bool done_ = false;
};

}  // namespace pycomm::cuda
