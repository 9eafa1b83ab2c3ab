// ticker.cc -- see ticker.h.
#include "ticker.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace pycomm {

namespace {

constexpr int idle_ticks = 50;  // before it sleeps: to wake it costs more than a tick
constexpr auto look_every = std::chrono::milliseconds(250);

}  // namespace

Ticker::Ticker(std::chrono::milliseconds tick, std::function<void()> look)
    : tick_(tick), look_(std::move(look)), thread_([this] { loop(); }) {
  ::pthread_setname_np(thread_.native_handle(), "pycomm-ticker");
}

Ticker::~Ticker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Ticker::Watched::Watched(Ticker& ticker, Ticket& ticket) : ticker_(ticker), ticket_(ticket) {
  bool asleep = false;
  {
    std::lock_guard lock(ticker_.mutex_);
    asleep = std::exchange(ticker_.asleep_, false);
    ticker_.tickets_.push_back(&ticket_);
  }
  if (asleep) ticker_.changed_.notify_all();
}

// The lock keeps a nudge from a ticket that is gone.
Ticker::Watched::~Watched() {
  std::lock_guard lock(ticker_.mutex_);
  auto& tickets = ticker_.tickets_;
  tickets.erase(std::find(tickets.begin(), tickets.end(), &ticket_));
}

void Ticker::loop() {
  auto next_look = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  for (int idle = 0; !stop_;) {
    idle = tickets_.empty() ? idle + 1 : 0;
    for (Ticket* ticket : tickets_) ticket->nudge();
    asleep_ = idle > idle_ticks;
    const auto woken = [this] { return stop_ || !asleep_; };
    if (asleep_ && look_) changed_.wait_for(lock, look_every, woken);
    else if (asleep_) changed_.wait(lock, woken);
    changed_.wait_for(lock, tick_, [this] { return stop_; });
    if (!look_ || stop_ || std::chrono::steady_clock::now() < next_look) continue;
    next_look = std::chrono::steady_clock::now() + look_every;
    lock.unlock();
    look_();
    lock.lock();
  }
}

}  // namespace pycomm
