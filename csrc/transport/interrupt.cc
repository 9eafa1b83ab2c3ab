// interrupt.cc -- see interrupt.h.
#include "interrupt.h"

#include <atomic>
#include <chrono>

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto ask_every = std::chrono::milliseconds(50);  // the contract is 0.2 s
std::atomic<bool (*)()> check_of_program{nullptr};
thread_local Clock::time_point next_ask{};

}  // namespace

void set_interrupt_check(bool (*check)()) { check_of_program.store(check); }

bool interrupted() {
  bool (*check)() = check_of_program.load(std::memory_order_acquire);
  if (!check) return false;
  const auto now = Clock::now();
  if (now < next_ask) return false;
  next_ask = now + ask_every;
  return check();
}

}  // namespace pycomm
