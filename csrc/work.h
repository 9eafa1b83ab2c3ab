// work.h -- the handle of an operation under way.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace pycomm {

class Work {
 public:
  virtual ~Work() = default;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Once done: null, or what went wrong.
  const std::exception_ptr& error() const { return error_; }

  virtual void wait(double timeout = 0) = 0;  // seconds, 0: the operation's own; throws what the operation threw
  virtual bool poll() = 0;                    // done? completes it on the way if that does not block
  // Lets the worker complete it. Small ones are left to a waiter, unless nobody_waits (only a future does).
  virtual void help(bool nobody_waits = false) = 0;

  // Runs callback once, when done (at once if it is already). From whatever thread completes the work.
  void on_completion(std::function<void()> callback) {
    {
      std::lock_guard lock(mutex_);
      if (!done()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }

 protected:
  // What must happen before anybody sees the work done (copy a result back, let go of a buffer). Set before the work starts.
  std::function<void()> finalizer_;

  void settle(std::exception_ptr error) {
    if (finalizer_) std::exchange(finalizer_, nullptr)();
    std::vector<std::function<void()>> callbacks;
    {
      std::lock_guard lock(mutex_);
      error_ = std::move(error);
      callbacks.swap(callbacks_);
      done_.store(true, std::memory_order_release);
    }
    for (auto& callback : callbacks) callback();
  }

 private:
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace pycomm
