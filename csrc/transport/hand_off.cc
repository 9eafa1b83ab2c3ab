// hand_off.cc -- see hand_off.h.
#include "hand_off.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "kernel_copy.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto patience_at_first =
    std::chrono::microseconds(200);  // until a peer's first answer: it may sleep
constexpr int batches = 8, rounds = 8;  // the fastest batch counts
constexpr int looks = 64;  // at a line, between two at the clock

// Spins until holds(), or the deadline.
template <class Holds>
bool spin_until(const Holds& holds, Clock::time_point deadline) {
  for (;;) {
    for (int look = 0; look < looks; ++look)
      if (holds()) return true;
    if (Clock::now() >= deadline) return holds();
  }
}

// The side that begins. Seconds from one to the other, or below 0.
double ping_over(std::atomic<uint64_t>& ball, Clock::duration first, Clock::duration others) {
  uint64_t turn = ball.load(std::memory_order_acquire) | 1;  // odd: not answered when the last one gave up
  double least = -1;
  Clock::time_point deadline = Clock::now() + first;
  for (int batch = -1; batch < batches; ++batch) {  // the first one wakes the peer
    const int count = batch < 0 ? 1 : rounds;
    const auto start = Clock::now();
    for (int round = 0; round < count; ++round) {
      turn += 2;
      ball.store(turn, std::memory_order_release);
      if (!spin_until([&] { return ball.load(std::memory_order_acquire) == turn + 1; }, deadline))
        return least;
    }
    const auto now = Clock::now();
    if (batch < 0) deadline = now + others;
    else {
      const double seconds = std::chrono::duration<double>(now - start).count() / (2 * rounds);
      least = least < 0 ? seconds : std::min(least, seconds);
    }
  }
  return least;
}

void answer_over(std::atomic<uint64_t>& ball) {
  const uint64_t turn = ball.load(std::memory_order_acquire);
  if (turn & 1) ball.store(turn + 1, std::memory_order_release);
}

// The word `answers`: the operation, then the answer from it on, then the one before it.
constexpr uint64_t answers_of(uint64_t from, bool after, bool before) {
  return from << 2 | uint64_t{after} << 1 | uint64_t{before};
}

}  // namespace

bool is_far(double seconds, bool otherwise, double farthest) {
  return seconds < 0 ? otherwise : seconds > farthest;
}

double hand_off_between_threads() {
  alignas(cache_line) std::atomic<uint64_t> ball{0};
  alignas(cache_line) std::atomic<bool> done{false};
  std::thread peer([&] {
    while (!done.load(std::memory_order_acquire)) answer_over(ball);
  });
  const double seconds = ping_over(ball, std::chrono::milliseconds(20), std::chrono::milliseconds(2));
  done.store(true, std::memory_order_release);
  peer.join();
  return seconds;
}

void HandOff::guess(bool far) {
  const bool ahead = far || kernel_copies_fast();
  memory_.header().answers.store(answers_of(0, ahead, ahead), std::memory_order_relaxed);
  memory_.header().hand_off_ns.store(-1, std::memory_order_relaxed);
}

void HandOff::begin(const WaitScope& scope) { measure(0, scope); }

bool HandOff::kernel_ahead(uint64_t sequence) const {
  const uint64_t answers = memory_.header().answers.load(std::memory_order_acquire);
  return answers >> (sequence >= answers >> 2 ? 1 : 0) & 1;
}

double HandOff::seconds() const {
  const double ns = memory_.header().hand_off_ns.load(std::memory_order_relaxed);
  return ns < 0 ? -1 : ns * 1e-9;
}

void HandOff::before(uint64_t sequence) {
  if (rank_ != 0 || is_due(sequence + 1) || Clock::now() < next_) return;
  memory_.header().measure_from.store(sequence + 1, std::memory_order_release);
}

bool HandOff::is_due(uint64_t sequence) const {
  const GroupHeader& header = memory_.header();
  const uint64_t from = header.measure_from.load(std::memory_order_acquire);
  return sequence >= from && header.measured.load(std::memory_order_acquire) <= from;
}

void HandOff::measure(uint64_t sequence, const WaitScope& scope) {
  if (rank_ != 0) return answer(sequence, scope);
  GroupHeader& header = memory_.header();
  const double seconds = slowest();
  if (seconds >= 0) {
    header.hand_off_ns.store(seconds * 1e9, std::memory_order_relaxed);
    const bool before = kernel_ahead(sequence);
    const bool after = is_far(seconds, before, pace_.farthest) || kernel_copies_fast();
    header.answers.store(answers_of(sequence + 1, after, before), std::memory_order_release);
  }
  header.measured.store(sequence + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // [Note: no lost wake-up] in wait.h
  ring_all_sleepers(memory_);
  next_ = Clock::now() + pace_.every;
}

double HandOff::slowest() const {
  double seconds = 0;
  for (int p = 1; p < world_size_; ++p) {
    const double one = ping_over(memory_.control(p).ball, patience_at_first, pace_.patience);
    if (one < 0) return one;
    seconds = std::max(seconds, one);
  }
  return seconds;
}

// Without a pause between looks, as long as it may take; then as every wait.
void HandOff::answer(uint64_t sequence, const WaitScope& scope) {
  std::atomic<uint64_t>& ball = memory_.control(rank_).ball;
  auto over = [&](int) {
    answer_over(ball);
    return memory_.header().measured.load(std::memory_order_acquire) > sequence;
  };
  const auto deadline = Clock::now() + (patience_at_first + pace_.patience) * (world_size_ - 1);
  if (!spin_until([&] { return over(0); }, deadline)) waiting_.wait_for(0, over, scope);
}

}  // namespace pycomm
