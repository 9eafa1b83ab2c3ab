// deadlines.h -- timeouts where kernels never wait (Protocol::stream_ordered, and messages on a shared
// device), so that the device itself does not look at the clock.
//
// The host looks at the words from time to time instead. A line that is at work may have gone round in
// between, and a replayed graph writes the same busy word each time, so a line is late only if nothing of it
// was ever seen to change for as long as its timeout.
//
// All of it is guarded by the group's lock (lock.h), which the caller holds.
#pragma once

#include "faults.h"
#include "lines.h"

namespace pycomm::cuda {

class Deadlines {
 public:
  Deadlines(const Setup& setup, const HostWords& words, Lines& lines, Faults& faults)
      : setup_(setup), words_(words), lines_(lines), faults_(faults) {}

  // The timeout of a call in seconds, where it asks for `timeout`, 0: the group's.
  double note(double timeout);
  // The operation with this busy word is about to enter a stream, in stream order, outside of captures.
  void expect(Line& line, uint32_t busy, double timeout);
  // Breaks the group if a line is late.
  void look();

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Arrivals {
    uint32_t wanted, come;  // bit r: rank r
  };
  Arrivals arrivals_of(const Line& line) const;
  void look_at(Line& line, Time now);
  double timeout_of(Line& line, uint32_t busy) const;

  const Setup& setup_;
  const HostWords& words_;
  Lines& lines_;
  Faults& faults_;
  double longest_ = 0;  // of all calls so far
};

}  // namespace pycomm::cuda
