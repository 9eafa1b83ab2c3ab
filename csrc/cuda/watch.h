// watch.h -- the thread that watches a group while its device works: reads the error word, looks at the
// peers' lives and at deadlines, stops the device's waits when the group is broken, completes works.
//
// The thread starts with the first operation. A tick costs a few loads and one query per line; with a trace
// also one per stream that has operations under way, and there are more of these (device_times.h). It takes
// the group's lock (lock.h) for each look, and completes works outside of it; start() and stop() expect the
// lock, drain() expects it and lets go of it while it sleeps.
//
// A dead peer breaks the group after `grace`, in which operations that it had finished its part of still end.
// A peer that has closed the group in good order breaks it only if something does not end for `patience`: its
// part of what is under way may well be done.
#pragma once

#include <thread>

#include "state.h"

namespace pycomm::cuda {

class Watcher {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Watcher(GroupState& state) : state_(state) {}
  ~Watcher();

  void start();  // or wakes it
  void stop();  // it ends soon
  void join();  // does nothing in one of its own callbacks; then the destructor joins
  bool on_own_thread() const { return thread_ && thread_->get_id() == std::this_thread::get_id(); }

  // Until all that was issued outside of captures so far has ended. False: it has not, within `limit`. With
  // `stop_device` the device's waits are ended.
  bool drain(std::unique_lock<std::mutex>& held, Clock::duration limit, bool stop_device = false);

 private:
  void run();
  void look();
  void rest(std::unique_lock<std::mutex>& held);  // until the next look
  void look_at_peers();
  bool running();  // has anything that was issued not ended?

  GroupState& state_;
  std::unique_ptr<std::thread> thread_;
  Clock::time_point gone_since_{};  // some peer is gone; the epoch: none is
  bool stopping_ = false, idle_ = false;
};

}  // namespace pycomm::cuda
