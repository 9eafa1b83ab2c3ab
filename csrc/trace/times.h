// times.h -- when the parts of one operation happened, and whether anybody wants to know.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "record.h"

namespace pycomm::trace {

inline constexpr uint32_t timing = 1, recording = 2;

// What this process measures: the bits above. One relaxed load per operation where it is 0; operations that
// are under way when it changes are measured as it was when they were issued.
inline std::atomic<uint32_t> state{0};
inline bool measuring() { return state.load(std::memory_order_relaxed) != 0; }

inline uint64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

struct Times {
  uint64_t issued = 0;  // 0: not measured, and nothing else is set
  uint64_t begun = 0, arrived = 0, ended = 0;
  uint64_t waited = 0;  // since when a caller is blocked; one thread sets it while another runs the operation
  uint16_t last = nobody;
  uint64_t ticket = 0;  // of its record, + 1
  uint32_t generation = 0;  // of the trace that has it

  bool measured() const { return issued != 0; }
  void wait_begins() {
    const std::atomic_ref since(waited);
    if (since.load(std::memory_order_relaxed) == 0) since.store(now_ns(), std::memory_order_relaxed);
  }
  // At the end, while another thread may begin to wait.
  Times at_end() {
    Times times{issued, begun, arrived, now_ns(), 0, last, ticket, generation};
    times.waited = std::atomic_ref(waited).load(std::memory_order_relaxed);
    return times;
  }
};

}  // namespace pycomm::trace
