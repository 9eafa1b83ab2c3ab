// wait.cc -- the one place where a rank waits.
//
// A wait goes through three stages: spin while every rank has a core of its own (transport.h), give way to others (sched_yield)
// while that lets others run, then sleep on a futex. The sleep ends by a ring of the doorbell or after a tick, on which
// the waiter looks at deadline, abort flag and the peers' lives: nobody needs a watchdog thread.
//
// [Note: no lost wake-up] The waiter counts itself in `sleepers`, then fences, then looks at the flag once more, then sleeps unless
// `doorbell` changed meanwhile. The writer stores the flag, then fences, then looks at `sleepers`. With both fences sequentially
// consistent, one of the two sees the other: either the waiter sees the flag or the writer rings.
//
// [Note: two ranks on one core] The scheduler may put two ranks on one core although another is free. A rank that spins there keeps the
// very peer from running that it waits for. So every rank notes the core it runs on when it publishes, and a spinner that finds
// an awaited peer on its own core gives way after a microsecond; the higher rank of the two also moves to a core without a rank.
//
// [Note: why not only sched_yield] With the kernel's autogroup scheduling, ranks started in sessions of their own (torchrun does)
// are scheduling groups of their own, and a yield lets nobody of another group run. A yield that comes back at once is
// taken as such a case, if an awaited peer is on this core, and the rank sleeps instead. Otherwise sleeping would help nobody, and waking
// an idle virtual core costs 30 us and more.
// [Note: who is to blame] In a chain of waits (a ring, messages) the rank that one waits for may itself only wait for another. Every
// rank in a slow wait leaves a heartbeat; on a deadline the ranks without one are named, they are computing, stopped or lost.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <sstream>

#include "transport.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double tick = 0.02;                     // seconds between looks at the peers' lives; the contract is 0.2 s
constexpr auto idle_yield = std::chrono::nanoseconds(350);  // a yield that returns faster than this let nobody run
constexpr auto hop_every = std::chrono::milliseconds(20);
constexpr auto heartbeat_until = std::chrono::milliseconds(100);  // several ticks: an older one is none
constexpr int useless_yields_allowed = 3;
constexpr auto yield_budget = std::chrono::microseconds(500);

int futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return static_cast<int>(::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0));
}

void ring_doorbell(RankControl& control) {
  control.doorbell.fetch_add(1, std::memory_order_release);
  futex(&control.doorbell, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace

bool Transport::anyone_sleeps() const {
  for (int p = 0; p < world_size_; ++p)
    if (controls_[p].sleepers.load(std::memory_order_relaxed) != 0) return true;
  return false;
}

void Transport::notify(int peer) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (controls_[peer].sleepers.load(std::memory_order_relaxed) != 0) ring_doorbell(controls_[peer]);
}

void Transport::ring_all() {
  for (int p = 0; p < world_size_; ++p)
    if (controls_[p].sleepers.load(std::memory_order_relaxed) != 0) ring_doorbell(controls_[p]);
}

void Transport::ring_self() { ring_doorbell(controls_[rank_]); }

void Transport::sleep_on_doorbell(bool (*quit)(const void*), const void* context, double seconds) {
  RankControl& self = controls_[rank_];
  self.sleepers.fetch_add(1, std::memory_order_relaxed);
  uint32_t seen = self.doorbell.load(std::memory_order_acquire);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // [Note: no lost wake-up]
  if (!quit(context)) {
    timespec limit{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
    futex(&self.doorbell, FUTEX_WAIT, seen, &limit);
  }
  self.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Transport::wait_slowly(int first, int last, ReadyFn ready, const void* context, const WaitScope& scope) {
  struct Pending {
    int first, last, self;
    ReadyFn ready;
    const void* context;
    bool none() const {
      for (int p = first; p < last; ++p)
        if (p != self && !ready(context, p)) return false;
      return true;
    }
    bool on_this_core(const Transport& transport) const {
      for (int p = first; p < last; ++p)
        if (p != self && transport.shares_core(p) && !ready(context, p)) return true;
      return false;
    }
  } pending{first, last, rank_, ready, context};

  auto now = Clock::now();
  if (!oversubscribed() && !scope.patient && pending.on_this_core(*this)) leave_shared_core(now);
  const auto look_every = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(tick / 2));
  auto next_look = now + look_every;
  auto yield_until = now + yield_budget;
  bool yield_helps = !scope.patient;
  int useless = 0;
  for (;;) {
    if (pending.none()) return;
    beat();
    note_core();
    if (idle_hook_) idle_hook_();
    if (now >= next_look || broken() || closed_.load(std::memory_order_relaxed)) {
      examine(first, last, ready, context, scope);
      next_look = now + look_every;
    }
    if (yield_helps && now < yield_until) {
      ::sched_yield();
      auto after = Clock::now();
      if (after - now < idle_yield && ++useless > useless_yields_allowed) yield_helps = !pending.on_this_core(*this);
      now = after;
      continue;
    }
    sleep_unless([&] { return pending.none() || broken(); }, tick);
    now = Clock::now();
  }
}

// [Note: two ranks on one core] Takes the peers' cores out of this thread's affinity mask and puts the mask back: the kernel moves the
// thread at once, and may move it wherever it likes afterwards. The lowest rank on a core stays.
void Transport::leave_shared_core(Clock::time_point now) {
  if (now < next_hop_) return;
  cpu_set_t allowed, others;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  others = allowed;
  bool lower_here = false;
  for (int p = 0; p < world_size_; ++p) {
    const int core = controls_[p].core.load(std::memory_order_relaxed);
    if (core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &others);
    lower_here |= p < rank_ && shares_core(p);
  }
  if (!lower_here || CPU_COUNT(&others) == 0) return;
  next_hop_ = now + hop_every;
  if (::sched_setaffinity(0, sizeof(others), &others) == 0) ::sched_setaffinity(0, sizeof(allowed), &allowed);
  note_core();
}

void Transport::note_core() { controls_[rank_].core.store(::sched_getcpu(), std::memory_order_relaxed); }

void Transport::beat() { controls_[rank_].heartbeat_ns.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed); }

bool Transport::has_heartbeat(int peer) const {
  return controls_[peer].heartbeat_ns.load(std::memory_order_relaxed) >= (Clock::now() - heartbeat_until).time_since_epoch().count();
}

// Looks at everything that can end a wait other than its condition. Throws, or returns to wait on.
void Transport::examine(int first, int last, ReadyFn ready, const void* context, const WaitScope& scope) {
  check(scope.op);
  bool late = Clock::now() >= scope.deadline;
  std::vector<int> missing;
  int closed = 0;
  for (int p = first; p < last; ++p) {
    if (p == rank_ || ready(context, p)) continue;
    if (controls_[p].state.load(std::memory_order_acquire) == RankState::closed) {
      if (ready(context, p)) continue;  // it finished this operation and left; its stores precede its farewell
      if (scope.any_peer && ++closed < last - first - 1) continue;
      fail(ErrorKind::peer, scope.op, p, "rank " + std::to_string(p) + " closed the group before it came to this operation");
    }
    if (!peer_alive(p)) {
      if (ready(context, p)) continue;
      fail(ErrorKind::peer, scope.op, p, "rank " + std::to_string(p) + " died (its process ended)");
    }
    missing.push_back(p);
  }
  if (!late || missing.empty()) return;
  if (std::all_of(missing.begin(), missing.end(), [this](int p) { return has_heartbeat(p); })) {
    std::vector<int> silent;  // [Note: who is to blame]
    for (int p = 0; p < world_size_; ++p)
      if (p != rank_ && !has_heartbeat(p)) silent.push_back(p);
    if (!silent.empty()) missing = silent;
  }
  std::ostringstream text;
  text << (missing.size() > 1 ? "ranks " : "rank ");
  for (size_t i = 0; i < missing.size(); ++i) text << (i ? ", " : "") << missing[i];
  text << " did not arrive within the timeout of " << scope.timeout << " s";
  fail(ErrorKind::timeout, scope.op, missing[0], text.str());
}

}  // namespace pycomm
