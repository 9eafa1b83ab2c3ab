// nccl_end.cc -- how NcclSide ends: its engine is shut down, or aborted, and what the device may still use is
// held. See [Note: one thread in NCCL at a time] and [Note: memory behind an error] in nccl_side.h.
//
// ncclCommAbort and ncclCommFinalize are called by torch and may hang, though they should not: the first
// where a thread of NCCL's own does not come back, the second where a rank died in the middle of it. torch
// limits neither in a way that fits.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <system_error>

#include "nccl_work.h"

namespace pycomm {

namespace {

constexpr std::chrono::seconds longest_farewell{10};
constexpr std::chrono::seconds longest_turn{1};  // that a thread is waited for that is in NCCL
constexpr std::chrono::seconds longest_abort{2};
constexpr std::chrono::milliseconds longest_return{200};  // of a shutdown that nothing holds, after a death

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// A call in a thread of its own, which keeps the engine: nobody has to wait for it. Not made where that of
// `before` has returned by then.
class Apart {
 public:
  Apart(BackendPtr backend, c10::Device device, void (*call)(c10d::Backend&), const Apart* before = nullptr) {
    const auto other = before ? before->state_ : nullptr;
    auto body = [state = state_, other, backend = std::move(backend), device, call]() mutable {
      try {
        // else CUDA makes a context on its first device
        c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
        if (!other || !other->returned.load()) call(*backend);
      } catch (const std::exception&) {
        // nobody is left to be told
      }
      state->returned.store(true);
      backend.reset();
      state->ended.store(true);
    };
    try {
      std::thread(body).detach();
    } catch (const std::system_error&) {  // no more threads
      body();
    }
  }
  // False: it has not ended within the time, or `look` threw.
  bool wait(std::chrono::milliseconds time, const std::function<void()>& look = [] {}) const {
    const auto limit = std::chrono::steady_clock::now() + time;
    while (!state_->ended.load()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      try {
        look();
      } catch (const CommError&) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }

 private:
  struct State {
    std::atomic<bool> returned{false}, ended{false};
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

void abort(c10d::Backend& backend) { backend.abort(); }
void shut_down(c10d::Backend& backend) { backend.shutdown(); }

bool has_passed(const c10::Event* event) {
  try {
    return event && event->query();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

bool NcclSide::end_engine() {
  std::unique_lock turn(turn_, std::defer_lock);
  // A signal handler may close the group in the middle of this thread's own call.
  if (holder_.load() != std::this_thread::get_id()) (void)turn.try_lock_for(longest_turn);
  return engine_.exchange(Engine::ended) == Engine::made;
}

void NcclSide::abort_engine() {
  if (aborted_.exchange(true) || !end_engine()) return;
  Apart(backend_, device_, abort).wait(longest_abort);
  stopped_by_ = Clock::now() + until_stopped;
}

// It waits for all ranks, of which one may die meanwhile.
void NcclSide::shut_engine_down() {
  if (!end_engine()) return;
  const Apart closing(backend_, device_, shut_down);
  if (closing.wait(longest_farewell, [this] { comm_.hosts_side()->look_at_lives({}); })) return;
  if (closing.wait(longest_return)) return;  // it has not waited for the dead: abort() may not follow it
  Apart(backend_, device_, abort, &closing).wait(longest_abort);
}

void NcclSide::give_up(NcclWork& work, std::exception_ptr error) {
  if (!work.passed()) {
    std::lock_guard lock(mutex_);
    held_.push_back(
        {work.copied_ ? work.copied_ : work.passed_, std::move(work.keep_), std::move(work.copy_back_)});
  }
  work.complete(std::move(error));
}

void NcclSide::give_up_by(Clock::time_point limit, NcclWork& work, const std::exception_ptr& error) {
  while (!work.passed() && Clock::now() < limit) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  give_up(work, error);
}

void NcclSide::let_go_of_held() {
  std::list<Held> over;  // declared first: tensors are let go of without the lock
  std::lock_guard lock(mutex_);
  for (auto next = held_.begin(); next != held_.end();) {
    const auto held = next++;
    if (has_passed(held->passed.get())) over.splice(over.end(), held_, held);
  }
}

bool NcclSide::drained(Clock::time_point limit) {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (pending_.empty()) return true;
    }
    if (Clock::now() > limit || on_own_thread()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::exception_ptr NcclSide::closed_error(const OpInfo& op) const {
  return std::make_exception_ptr(CommError(ErrorKind::aborted,
                                           comm_.transport().where(op) + "the communicator is closed",
                                           comm_.rank(), comm_.world_size(), op, -1));
}

void NcclSide::close() {
  if (comm_.transport().forked()) return;
  drained(Clock::now() + longest_farewell);
  std::list<WorkPtr> left;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(stop_, true)) return;
    left = std::exchange(pending_, {});
  }
  changed_.notify_all();
  if (thread_.joinable() && !on_own_thread()) thread_.join();
  if (!left.empty() || comm_.transport().broken()) abort_engine();
  else shut_engine_down();
  for (const WorkPtr& work : left) give_up_by(stopped_by_, *work, closed_error(work->info_));
}

// A forked child has neither the thread nor the engine's, and must not touch the device.
NcclSide::~NcclSide() {
  const bool forked = comm_.transport().forked();
  if (forked) {
    (void)new std::thread(std::move(thread_));
    (void)new BackendPtr(std::move(backend_));
    (void)new std::list<WorkPtr>(std::move(pending_));
    (void)new std::vector<WorkPtr>(std::move(batch_));
  } else {
    close();
    if (thread_.joinable()) thread_.join();
    let_go_of_held();
  }
  if (!held_.empty()) (void)new std::list<Held>(std::move(held_));
}

}  // namespace pycomm
