// late.h -- who learns the end of an operation late: operations on a device.
//
// Such an operation is recorded a third time, when somebody has seen its end there: cuda/device_times.h. Its
// begin and end are those of a clock of the device (cuda/device_clock.h) with this number in the place of
// `last`, `nobody` where the times are not known; the reader finds out what they are by the host's clock
// (pycomm/trace/device_clock.py). The kind `none` is a launch of a fused product, whose sequence numbers are
// its own.
//
// Before a trace ends, those who know more are asked for it.
#pragma once

namespace pycomm::trace {

class Late {
 public:
  // On the thread that ends the trace, which waits. It may record, but not begin or end a trace.
  virtual void late() = 0;

 protected:
  ~Late() = default;
};

// A forked child begins with none.
void add(Late& late);
void remove(Late& late);  // not while it is asked

}  // namespace pycomm::trace
