// wait.cc -- see wait.h.
#include "wait.h"

#include <sched.h>

#include <numeric>
#include <sstream>

#include "interrupt.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double tick = 0.02;  // seconds between looks at the peers' lives; the contract is 0.2 s
constexpr auto idle_yield =
    std::chrono::nanoseconds(350);  // a yield that returns faster than this let nobody run
constexpr auto hop_every = std::chrono::milliseconds(20);
constexpr auto heartbeat_until = std::chrono::milliseconds(100);  // several ticks: an older one is none
constexpr int useless_yields_allowed = 3;
constexpr auto yield_budget = std::chrono::microseconds(500);

}  // namespace

Waiting::Waiting(const Identity& identity, GroupMemory& memory, Health& health, int cores)
    : memory_(memory),
      health_(health),
      controls_(&memory.control(0)),
      rank_(identity.rank),
      world_size_(identity.world_size),
      cores_(cores),
      oversubscribed_(identity.world_size > cores),
      identity_(identity) {}

void Waiting::sleep_on_doorbell(bool (*quit)(const void*), const void* context, double seconds) {
  RankControl& self = controls_[rank_];
  self.sleepers.fetch_add(1, std::memory_order_relaxed);
  uint32_t seen = self.doorbell.load(std::memory_order_acquire);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // [Note: no lost wake-up]
  if (!quit(context)) sleep_on(self, seen, seconds);
  self.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Waiting::wait_slowly(int first, int last, const Condition& ready, const WaitScope& scope) {
  auto none_pending = [&] {
    for (int p = first; p < last; ++p)
      if (p != rank_ && !ready(p)) return false;
    return true;
  };
  auto pending_on_this_core = [&] {
    for (int p = first; p < last; ++p)
      if (p != rank_ && shares_core(p) && !ready(p)) return true;
    return false;
  };

  auto now = Clock::now();
  if (!oversubscribed_ && !scope.patient && pending_on_this_core()) leave_shared_core(now);
  const auto look_every =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(tick / 2));
  auto next_look = now + look_every;
  auto yield_until = now + yield_budget;
  bool yield_helps = !scope.patient && scope.yields;
  int useless = 0;
  const struct Told {  // however the wait ends
    Waiting& waiting;
    ~Told() { waiting.tell_status({}, {}); }
  } told{*this};
  for (;;) {
    if (none_pending()) return;
    beat();
    note_core();
    idle();
    if (interrupted()) {
      health_.abort(interrupted_text);
      health_.check(scope.op);
    }
    if (now >= next_look || health_.broken() || health_.closed()) {
      examine(first, last, ready, scope);
      next_look = now + look_every;
    }
    if (yield_helps && now < yield_until) {
      ::sched_yield();
      auto after = Clock::now();
      if (after - now < idle_yield && ++useless > useless_yields_allowed)
        yield_helps = !pending_on_this_core();
      now = after;
      continue;
    }
    sleep_unless([&] { return none_pending() || health_.broken(); }, tick);
    now = Clock::now();
  }
}

// [Note: two ranks on one core] Takes the peers' cores out of this thread's affinity mask and puts the mask
// back: the kernel moves the thread at once, and may move it wherever it likes afterwards. The lowest rank on
// a core stays.
void Waiting::leave_shared_core(Clock::time_point now) {
  if (now.time_since_epoch().count() < next_hop_.load(std::memory_order_relaxed)) return;
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
  next_hop_.store((now + hop_every).time_since_epoch().count(), std::memory_order_relaxed);
  if (::sched_setaffinity(0, sizeof(others), &others) == 0) ::sched_setaffinity(0, sizeof(allowed), &allowed);
  note_core();
}

void Waiting::note_core() { controls_[rank_].core.store(::sched_getcpu(), std::memory_order_relaxed); }

void Waiting::beat() {
  controls_[rank_].heartbeat_ns.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
}

bool Waiting::has_heartbeat(int peer) const {
  return controls_[peer].heartbeat_ns.load(std::memory_order_relaxed) >=
         (Clock::now() - heartbeat_until).time_since_epoch().count();
}

// Looks at everything that can end a wait other than its condition. Throws, or returns to wait on.
void Waiting::examine(int first, int last, const Condition& ready, const WaitScope& scope) {
  health_.check(scope.op);
  bool late = Clock::now() >= scope.deadline;
  std::vector<int> missing;
  int closed = 0;
  for (int p = first; p < last; ++p) {
    if (p == rank_ || ready(p)) continue;
    const bool left = health_.peer_closed(p), died = !left && !health_.peer_alive(p);
    // [Note: the last look]: its stores precede its farewell.
    if ((left || died || late) && ready.surely(p)) continue;
    if (left) {
      if (scope.any_peer && ++closed < last - first - 1) continue;
      health_.fail(ErrorKind::peer, scope.op, p,
                   health_.name(p) + " closed the group before it came to this operation");
    }
    if (died) health_.fail(ErrorKind::peer, scope.op, p, health_.name(p) + " died (its process ended)");
    missing.push_back(p);
  }
  tell_status(missing, scope.op);
  if (late && !missing.empty()) fail_for(std::move(missing), scope);
}

// For whom this rank waits, as users know them.
void Waiting::tell_status(const std::vector<int>& missing, const OpInfo& op) {
  if (!status_) return;
  const auto kind = missing.empty() ? 0 : static_cast<uint32_t>(op.kind);
  if (kind && status_->waiting_in.load(std::memory_order_relaxed) == 0)
    status_->waiting_since_ns.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  for (size_t i = 0; i < std::min<size_t>(missing.size(), shown_missing); ++i)
    status_->ranks[i].store(static_cast<uint16_t>(identity_.number(missing[i])), std::memory_order_relaxed);
  status_->missing.store(static_cast<uint32_t>(missing.size()), std::memory_order_relaxed);
  status_->waiting_in.store(kind, std::memory_order_release);
}

// The deadline has passed: names who is to blame.
void Waiting::fail_for(std::vector<int> missing, const WaitScope& scope) {
  // [Note: who is to blame]: those without a heartbeat, of the missing if there are any.
  auto silent_of = [this](const std::vector<int>& ranks) {
    std::vector<int> silent;
    for (int p : ranks)
      if (p != rank_ && !has_heartbeat(p)) silent.push_back(p);
    return silent;
  };
  std::vector<int> all(world_size_);
  std::iota(all.begin(), all.end(), 0);
  std::vector<int> silent = silent_of(missing);
  if (silent.empty()) silent = silent_of(all);
  if (!silent.empty()) missing = silent;
  std::ostringstream text;
  text << health_.names(missing);
  text << " did not arrive within the timeout of " << scope.timeout << " s";
  health_.fail(ErrorKind::timeout, scope.op, missing[0], text.str());
}

}  // namespace pycomm
