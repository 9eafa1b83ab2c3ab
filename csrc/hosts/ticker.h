// ticker.h -- brings ranks back out of the engine now and then.
//
// An engine's wait() blocks inside the engine, which knows nothing of deadlines, of a group that has broken
// or of Ctrl-C. So whoever waits there hands its ticket to this thread, which nudges it every `tick`: the
// waiter looks around and waits again. When nobody has waited for a while it wakes for its own look alone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "wire.h"

namespace pycomm {

class Ticker {
 public:
  // `look`: called several times a second, for as long as the ticker lives; may be empty.
  explicit Ticker(std::chrono::milliseconds tick, std::function<void()> look = {});
  ~Ticker();
  Ticker(const Ticker&) = delete;

  // While it lives, wait() of `ticket` returns at least once in every two ticks.
  class Watched {
   public:
    Watched(Ticker& ticker, Ticket& ticket);
    ~Watched();
    Watched(const Watched&) = delete;

   private:
    Ticker& ticker_;
    Ticket& ticket_;
  };
  bool is_this_thread() const { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  void loop();

  const std::chrono::milliseconds tick_;
  const std::function<void()> look_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Ticket*> tickets_;
  bool stop_ = false, asleep_ = false;
  std::thread thread_;
};

}  // namespace pycomm
