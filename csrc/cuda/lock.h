// lock.h -- the lock of a group, and who takes which lock before which other.
//
// [Note: locks of a CUDA group] One lock guards the order of issue and everything that changes while a group
// is used: lines, registered memory, what went wrong, works that have not ended, deadlines. Each part says at
// its head whether it takes the lock or expects it. Locks are taken in this order, and none is held while a
// work completes, since that runs callbacks:
//
//   1. Communicator::making_device_side   while a group is made
//   2. the group's lock                   around issuing, and each look of the watching thread
//   3. leaves                             of event pools, clocks, the driver's contexts, parked memory:
//                                         nothing is taken inside
//
// Collective steps (agree(), all_gather_value()) wait for other ranks, so they run without the group's lock:
// the watching thread needs it in the meantime.
#pragma once

#include <condition_variable>
#include <mutex>

#include "../communicator/communicator.h"

namespace pycomm::cuda {

class GroupLock {
 public:
  explicit GroupLock(Transport& transport) : transport_(transport) {}
  ~GroupLock() {
    if (transport_.forked()) (void)state_.release();  // the copied mutex may be locked
  }
  GroupLock(const GroupLock&) = delete;

  // Throws in a forked child, where it could be locked for ever.
  std::unique_lock<std::mutex> take(const OpInfo& info) {
    if (transport_.forked()) transport_.check(info);
    return take_here();
  }
  // For those who know that this is no forked child.
  std::unique_lock<std::mutex> take_here() { return std::unique_lock(state_->mutex); }

  // Holds nothing where another thread has it.
  std::unique_lock<std::mutex> try_take() {
    return transport_.forked() ? std::unique_lock<std::mutex>()
                               : std::unique_lock(state_->mutex, std::try_to_lock);
  }

  // For the watching thread: there is work, or it is to end.
  void wake() { state_->changed.notify_all(); }
  void sleep(std::unique_lock<std::mutex>& held, std::chrono::microseconds longest) {
    state_->changed.wait_for(held, longest);
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
  };
  Transport& transport_;
  std::unique_ptr<State> state_ = std::make_unique<State>();
};

}  // namespace pycomm::cuda
