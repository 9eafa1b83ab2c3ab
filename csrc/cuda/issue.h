// issue.h -- how a planned operation gets into a stream: behind what must come before it in its line
// ([Note: lines], lines.h), then step by step, then an event that marks its end.
//
// All of it is guarded by the group's lock (lock.h), which the caller holds: it is the order of issue.
#pragma once

#include <functional>

#include "plan.h"
#include "state.h"
#include "sync_words.h"

namespace pycomm::cuda {

// What the front ends say about a call.
struct Issue {
  Stream stream = nullptr;  // the caller's current stream
  bool async_op = false;  // on a stream of the group; the caller's is not held up until wait()
  bool watched = false;  // the work completes by itself, as an asynchronous one does
  double timeout = 0;  // seconds, 0: the group's
  std::function<Stream()> current;  // asked by wait()
  std::function<void()> keep;  // owns the buffers; let go when the operation has ended
  std::function<void(Stream)> after;  // enqueues what belongs to the operation behind it, in its stream
};

class Issuer {
 public:
  explicit Issuer(GroupState& state) : state_(state) {}

  // Enqueues the operation `info` of `line`; returns its end. Throws; the group is then broken if some steps
  // are in the stream and others are not. `call` is told where it begins and ends.
  Mark enqueue(Line& line, const LaunchPlan& plan, const OpInfo& info, const Issue& issue, TracedCall& call);

  // Before and behind a launch into `stream` that is not the group's own and stands in `line`.
  void enter_line(const Line& line, const OpInfo& info, Stream stream);
  void leave_line(Line& line, Stream stream);

 private:
  void refuse_shared_stream(const OpInfo& info, Stream stream) const;
  void count_own_stream(const OpInfo& info, const Line& line);
  Stream enter(Line& line, const Issue& issue, const Capture& capture);
  void order_behind_last(const Line& line, Stream stream, const Capture& capture) const;
  // What is to be done with words, in this order, before anything else in the stream.
  using Words = std::vector<WordOperation>;
  void run_steps(const LaunchPlan& plan, Words& words, Stream stream);
  // By one call: where contexts take turns at the device, each call may cost a turn.
  void flush(Words& words, Stream stream) const;

  GroupState& state_;
  uint64_t exchanges_ = 0;  // of all ranks, so far
};

}  // namespace pycomm::cuda
