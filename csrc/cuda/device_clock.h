// device_clock.h -- when events happened on a device: numbers that grow with its clock, for traces.
//
// The driver does not tell when an event happened, only how long it was from one event to another, in a float
// of milliseconds. A float has 24 bits: after a second its steps are 60 ns, after an hour 0.25 ms. So times
// are added up from event to event, in integers:
//
//     base          base'          base''                    an event that is kept
//     |---- 1 s ----|---- 1 s -----|- - - - - more than 16 s - - - - -|---
//     clock 5                                                         clock 6
//                                                                     |
//     at the first base of a clock: the host's time before it was recorded
//
// A base is replaced once an operation has ended a second behind it. After a longer pause than `longest_gap`
// the next number would be off by microseconds, and nobody knows how the two clocks have drifted meanwhile:
// then a new clock begins, with the next number. What a clock says grows as the device's own does and is
// never later than the host's time was, by an amount that the reader of the trace finds out
// (pycomm/trace/device_clock.py).
//
// [Note: elapsed times backwards] Operations of several streams end in any order, so an event may have
// happened before the base. Whether the driver then says a negative time, 0 or an error is not documented.
// Such a pair is asked for in the other order, too, where the answer is positive.
//
// All groups of a process that work on a device share its clock, so that their operations keep their order in
// the trace. Thread-safe, by a lock inside which only the driver is called.
#pragma once

#include <optional>

#include "events.h"

namespace pycomm::cuda {

class DeviceClock {
 public:
  // The clock of that device in this process. It lives as long as somebody holds it.
  static std::shared_ptr<DeviceClock> of(Device device);
  explicit DeviceClock(Device device);

  // nullptr where the driver refuses. The device must be current.
  EventPtr record(Stream stream) { return events_->record_if_possible(stream); }

  struct Interval {
    uint64_t begin, end;  // nanoseconds of the clock
    uint16_t number;  // of the clock, in this trace
  };
  // Of two events of one stream that the device has come to. before_ns: the host's time before `begin` was
  // recorded; generation: of the trace. Nothing where the driver does not tell.
  std::optional<Interval> read(const EventPtr& begin, const EventPtr& end, uint64_t before_ns,
                               uint32_t generation);

 private:
  void restart(const EventPtr& at, uint64_t before_ns, uint32_t generation);

  const std::shared_ptr<EventPool> events_;
  std::mutex mutex_;
  EventPtr base_;
  int64_t base_ns_ = 0;
  uint16_t number_ = 0;
  uint32_t generation_ = 0;
};

}  // namespace pycomm::cuda
