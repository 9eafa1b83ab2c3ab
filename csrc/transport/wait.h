// wait.h -- the one place where a rank waits.
//
// A wait goes through three stages: spin while every rank has a core of its own, give way to others
// (sched_yield) while that lets others run, then sleep on a futex. The sleep ends by a ring of the
// doorbell or after a tick, on which the waiter looks at deadline, abort flag and the peers' lives: nobody
// needs a watchdog thread.
//
// [Note: no lost wake-up] The waiter counts itself in `sleepers`, then fences, then looks at the flag once
// more, then sleeps unless `doorbell` changed meanwhile. The writer stores the flag, then fences, then looks
// at `sleepers`. With both fences sequentially consistent, one of the two sees the other: either the waiter
// sees the flag or the writer rings.
//
// [Note: two bells] A rank's worker that has nothing to do sleeps on a bell of its own: the doorbell rings
// for every flag that a waiting caller may need, and each ring would bring the worker onto the caller's core.
// The helper's bell rings when the worker is needed: by its own rank for an operation that nobody runs, by a
// peer that has waited a while for a message (collectives/send_recv.h). A keen helper has messages that
// nobody waits for and wants every ring of the doorbell, too. No wake-up is lost, as above.
//
// [Note: two ranks on one core] The scheduler may put two ranks on one core although another is free. A rank
// that spins there keeps the very peer from running that it waits for. So every rank notes the core it runs
// on when it publishes, and a spinner that finds an awaited peer on its own core gives way after a
// microsecond; the higher rank of the two also moves to a core without a rank.
//
// [Note: why not only sched_yield] With the kernel's autogroup scheduling, ranks started in sessions of their
// own (torchrun does) are scheduling groups of their own, and a yield lets nobody of another group run. A
// yield that comes back at once is taken as such a case, if an awaited peer is on this core, and the rank
// sleeps instead. Otherwise sleeping would help nobody, and waking an idle virtual core costs 30 us and more.
//
// [Note: who is to blame] In a chain of waits (a ring, messages) the rank that one waits for may itself only
// wait for another. Every rank in a slow wait leaves a heartbeat; on a deadline the ranks without one are
// named, they are computing, stopped or lost.
//
// [Note: the last look] A peer may finish an operation and leave, or die, right after a look at its flag. So
// before a wait ends early, it asks for its condition once more, after it has seen that the peer has gone. A
// condition that gives way to another thread when asked (messages: whoever has the lock moves them) also has
// a `surely`, which waits for that thread and then says what is true.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>

#include "doorbell.h"
#include "health.h"
#include "status_page.h"

namespace pycomm {

// How a wait ends early. Passed by reference through a whole operation.
struct WaitScope {
  OpInfo op;
  std::chrono::steady_clock::time_point deadline;
  double timeout;  // seconds, for the message
  bool any_peer =
      false;  // one of the peers suffices: those that closed the group are not missed while one is left
  bool patient = false;  // a worker thread: sleeps early, the cores belong to the caller
  bool yields = true;  // before it sleeps; not where others than the ranks here want the cores
};

inline WaitScope scope_of(const OpInfo& op, double timeout) {
  const std::chrono::duration<double> limit(std::min(timeout, 1e8));
  return {op,
          std::chrono::steady_clock::now() +
              std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit),
          timeout};
}

// What a wait waits for, by peer. Ready is called often, must be cheap and load with acquire order; its
// `surely`, if it has one, is called before the wait ends early ([Note: the last look]).
class Condition {
 public:
  template <class Ready>
  explicit Condition(const Ready& ready) : context_(&ready), ready_(&call<Ready>), surely_(&ask<Ready>) {}
  bool operator()(int peer) const { return ready_(context_, peer); }
  bool surely(int peer) const { return surely_(context_, peer); }

 private:
  template <class Ready>
  static bool call(const void* ready, int peer) {
    return (*static_cast<const Ready*>(ready))(peer);
  }
  template <class Ready>
  static bool ask(const void* ready, int peer) {
    if constexpr (requires(const Ready& r) { r.surely(peer); })
      return static_cast<const Ready*>(ready)->surely(peer);
    else return call<Ready>(ready, peer);
  }

  const void* context_;
  bool (*ready_)(const void*, int);
  bool (*surely_)(const void*, int);
};

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Pause instructions: 30 to 50 us on recent x86, longer than any small operation.
inline constexpr int spins_before_slow = 1000;
inline constexpr int spins_of_the_patient = 50;
inline constexpr int spins_before_core_check = 20;

class Waiting {
 public:
  // `cores`: that the ranks of the group may run on, together.
  Waiting(const Identity& identity, GroupMemory& memory, Health& health, int cores);

  int cores() const { return cores_; }
  bool oversubscribed() const { return oversubscribed_; }

  // Returns when ready(peer) is true for `peer`, or for every rank other than this one. Throws CommError:
  // timeout (naming who is missing), peer death, abort.
  template <class Ready>
  void wait_for(int peer, const Ready& ready, const WaitScope& scope) {
    if (!spin(peer, peer + 1, ready, scope)) wait_slowly(peer, peer + 1, Condition(ready), scope);
  }
  template <class Ready>
  void wait_all(const Ready& ready, const WaitScope& scope) {
    if (!spin(0, world_size_, ready, scope)) wait_slowly(0, world_size_, Condition(ready), scope);
  }
  // One look at everything that could end such a wait early, for those who poll instead of waiting. Throws,
  // or returns.
  template <class Ready>
  void look(int first, int last, const Ready& ready, const WaitScope& scope) {
    examine(first, last, Condition(ready), scope);
  }
  // Sleeps at most `seconds` until somebody rings this rank's doorbell, unless quit() already holds.
  template <class Quit>
  void sleep_unless(const Quit& quit, double seconds) {
    sleep_on_doorbell([](const void* q) { return (*static_cast<const Quit*>(q))(); }, &quit, seconds);
  }

  // After a release store that `peer` may sleep for.
  void notify(int peer) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // [Note: no lost wake-up]
    ring_sleeper(controls_[peer]);
    if (controls_[peer].helpers.load(std::memory_order_relaxed) >= keen_helper)
      ring_sleeping_helper(controls_[peer]);
  }
  // After a release store that makes `ready(self)` true: wakes the sleepers if it is now true for all ranks.
  // Sleepers that wait for all ranks are woken once, by the last to arrive, instead of n-1 times.
  template <class Ready>
  void notify_if_last(const Ready& ready) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // [Note: no lost wake-up]
    if (!anyone_sleeps(memory_)) return;
    for (int p = 0; p < world_size_; ++p)
      if (!ready(p)) return;
    ring_all_sleepers(memory_);
  }
  void ring_self() { ring(controls_[rank_]); }
  // [Note: two bells]
  template <class Quit>
  void sleep_as_helper(const Quit& quit, bool keen, double seconds) {
    RankControl& self = controls_[rank_];
    const uint32_t state = keen ? keen_helper : 1;
    self.helpers.fetch_add(state, std::memory_order_relaxed);
    const uint32_t seen = self.helper_bell.load(std::memory_order_acquire);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // [Note: no lost wake-up]
    if (!quit()) sleep_on_helper_bell(self, seen, seconds);
    self.helpers.fetch_sub(state, std::memory_order_relaxed);
  }
  void ring_helper(int peer) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // [Note: no lost wake-up]
    ring_sleeping_helper(controls_[peer]);
  }

  // Says where this rank runs, so that peers do not spin on the core that it needs.
  void note_core();
  void beat();  // leaves a heartbeat: [Note: who is to blame]
  void set_idle_hook(std::function<void()> hook) { idle_hook_ = std::move(hook); }
  void idle() {
    if (idle_hook_) idle_hook_();
  }
  void set_status(StatusRow* row) { status_ = row; }  // status_page.h

 private:
  template <class Ready>
  bool spin(int first, int last, const Ready& ready, const WaitScope& scope) const;
  void wait_slowly(int first, int last, const Condition& ready, const WaitScope& scope);
  void examine(int first, int last, const Condition& ready, const WaitScope& scope);
  [[noreturn]] void fail_for(std::vector<int> missing, const WaitScope& scope);
  void sleep_on_doorbell(bool (*quit)(const void*), const void* context, double seconds);
  bool has_heartbeat(int peer) const;
  void leave_shared_core(std::chrono::steady_clock::time_point now);
  void tell_status(const std::vector<int>& missing, const OpInfo& op);
  bool shares_core(int peer) const {
    return controls_[peer].core.load(std::memory_order_relaxed) ==
           controls_[rank_].core.load(std::memory_order_relaxed);
  }

  GroupMemory& memory_;
  Health& health_;
  RankControl* const controls_;
  const int rank_, world_size_, cores_;
  const bool oversubscribed_;
  std::atomic<int64_t> next_hop_{0};  // of the steady clock; several threads of a rank may wait
  std::function<void()> idle_hook_;
  const Identity& identity_;
  StatusRow* status_ = nullptr;
};

template <class Ready>
bool Waiting::spin(int first, int last, const Ready& ready, const WaitScope& scope) const {
  int spins = 0;
  const int limit = oversubscribed_ ? 0 : scope.patient ? spins_of_the_patient : spins_before_slow;
  for (int p = first; p < last; ++p) {
    if (p == rank_) continue;
    while (!ready(p)) {
      if (++spins > limit || (spins == spins_before_core_check && shares_core(p))) return false;
      cpu_relax();
    }
  }
  return true;
}

}  // namespace pycomm
