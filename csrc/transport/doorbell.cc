// doorbell.cc -- see doorbell.h.
#include "doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace pycomm {

namespace {

int futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return static_cast<int>(
      ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0));
}

void sleep_on_word(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  timespec limit{static_cast<time_t>(seconds),
                 static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
  futex(&word, FUTEX_WAIT, seen, &limit);
}

}  // namespace

void ring(RankControl& control) {
  control.doorbell.fetch_add(1, std::memory_order_release);
  futex(&control.doorbell, FUTEX_WAKE, INT_MAX, nullptr);
}

void ring_sleeper(RankControl& control) {
  if (control.sleepers.load(std::memory_order_relaxed) != 0) ring(control);
}

void ring_all_sleepers(const GroupMemory& memory) {
  for (int p = 0; p < memory.world_size(); ++p) ring_sleeper(memory.control(p));
}

bool anyone_sleeps(const GroupMemory& memory) {
  for (int p = 0; p < memory.world_size(); ++p)
    if (memory.control(p).sleepers.load(std::memory_order_relaxed) != 0) return true;
  return false;
}

void ring_sleeping_helper(RankControl& control) {
  if (control.helpers.load(std::memory_order_relaxed) == 0) return;
  control.helper_bell.fetch_add(1, std::memory_order_release);
  futex(&control.helper_bell, FUTEX_WAKE, INT_MAX, nullptr);
}

void sleep_on(RankControl& control, uint32_t seen, double seconds) {
  sleep_on_word(control.doorbell, seen, seconds);
}

void sleep_on_helper_bell(RankControl& control, uint32_t seen, double seconds) {
  sleep_on_word(control.helper_bell, seen, seconds);
}

}  // namespace pycomm
