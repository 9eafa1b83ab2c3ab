// lanes.cc -- see lanes.h.
#include "lanes.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <system_error>

namespace pycomm {

Lanes::~Lanes() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  begin_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// Starts what is missing; returns how many lanes have a thread.
int Lanes::threads_for(int count) {
  while (static_cast<int>(threads_.size()) < count) {
    const int lane = static_cast<int>(threads_.size()) + 1;
    try {
      threads_.emplace_back([this, lane] { loop(lane); });
    } catch (const std::system_error&) {
      break;
    }
    ::pthread_setname_np(threads_.back().native_handle(), "pycomm-lane");
  }
  return std::min(count, static_cast<int>(threads_.size()));
}

void Lanes::run_lane(int lane) {
  try {
    (*body_)(lane);
  } catch (...) {
    errors_[lane] = std::current_exception();
  }
}

void Lanes::run(int count, const std::function<void(int)>& body) {
  const int helped = threads_for(count - 1);
  errors_.assign(count, nullptr);
  body_ = &body;
  {
    std::lock_guard lock(mutex_);
    count_ = helped + 1;
    running_ = helped;
    ++round_;
  }
  begin_.notify_all();
  run_lane(0);
  for (int lane = helped + 1; lane < count; ++lane) run_lane(lane);
  {
    std::unique_lock lock(mutex_);
    end_.wait(lock, [this] { return running_ == 0; });
  }
  for (auto& error : errors_)
    if (error) std::rethrow_exception(error);
}

void Lanes::loop(int lane) {
  std::unique_lock lock(mutex_);
  for (uint64_t done = 0;;) {
    begin_.wait(lock, [&] { return stop_ || (round_ != done && lane < count_); });
    if (stop_) return;
    done = round_;
    lock.unlock();
    run_lane(lane);
    lock.lock();
    if (--running_ == 0) end_.notify_one();
  }
}

}  // namespace pycomm
