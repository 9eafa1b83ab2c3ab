// work.h -- the handle of an operation under way.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace pycomm {

// [Note: the end of a work] Whoever sees done() may free the work at once: a synchronous call has it on its
// stack. So the store of done_ is the last that the settling thread does to it; the lock, which orders the
// list of callbacks, is let go before. Whoever adds a callback between the two (settled_, not done_) waits
// for those few instructions and the endings: a callback finds its work done.
class Work {
 public:
  virtual ~Work() = default;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Once done: null, or what went wrong.
  const std::exception_ptr& error() const { return error_; }

  virtual void wait(
      double timeout = 0) = 0;  // seconds, 0: the operation's own; throws what the operation threw
  virtual bool poll() = 0;                    // done? completes it on the way if that does not block
  // Lets the worker complete it. Small ones are left to a waiter, unless nobody_waits (only a future does).
  virtual void help(bool nobody_waits = false) = 0;

  // Runs ending once, before anybody sees the work done (at once if its end is decided). It must not throw,
  // and everybody waits for it: it takes no lock that a caller may hold.
  void before_done(std::function<void()> ending) {
    {
      std::lock_guard lock(mutex_);
      if (!settled_) {
        endings_.push_back(std::move(ending));
        return;
      }
    }
    ending();
  }

  // Runs callback once, when done (at once if it is already). From whatever thread completes the work, so it
  // must not throw: nobody could catch it.
  void on_completion(std::function<void()> callback) {
    {
      std::lock_guard lock(mutex_);
      if (!settled_) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    while (!done()) std::this_thread::yield();
    callback();
  }

 protected:
  // What must happen before anybody sees the work done (copy a result back, let go of a buffer). Set before
  // the work starts. What it throws is the error of the work; after an error there is no result, and it is
  // dropped without a run.
  std::function<void()> finalizer_;

  // Lets go of what the work used, whether it failed or not. Like the finalizer, before anybody sees it done.
  virtual void release() {}

  void settle(std::exception_ptr error) {
    if (auto finalizer = std::exchange(finalizer_, nullptr); finalizer && !error) {
      try {
        finalizer();
      } catch (const std::exception&) {
        error = std::current_exception();
      }
    }
    release();
    std::vector<std::function<void()>> endings, callbacks;
    {
      std::lock_guard lock(mutex_);
      error_ = std::move(error);
      endings.swap(endings_);
      callbacks.swap(callbacks_);
      settled_ = true;
    }
    for (auto& ending : endings) ending();
    done_.store(true, std::memory_order_release);  // [Note: the end of a work]
    for (auto& callback : callbacks) callback();
  }

 private:
  std::atomic<bool> done_{false};
  bool settled_ = false;  // guarded by mutex_
  std::exception_ptr error_;
  std::mutex mutex_;
  std::vector<std::function<void()>> endings_, callbacks_;
};

}  // namespace pycomm
