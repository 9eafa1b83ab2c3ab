// hand_off.h -- measures how fast a cache line passes between the ranks' cores, and decides from that whether
// one copy by the kernel beats two through shared memory.
//
// Through shared memory a line moves twice: one core writes it and another reads it. The kernel moves it
// once, but looks up every page. Where the cores share a cache, a line takes about 30 ns and two copies win,
// unless the kernel copies fast (kernel_copy.h). Between caches a line takes 200 ns and one copy wins. The
// system does not know which case holds: a virtual machine's cores move between caches within seconds, and
// its description of the caches may be wrong. So the ranks measure.
//
//   rank 0                        rank p                     rank q           ball[p]
//   ball[p] = 1  ---------------> sees 1, ball[p] = 2        waits            1, 2
//   sees 2, ball[p] = 3  -------> sees 3, ball[p] = 4        waits            3, 4     ... `rounds` times
//   ball[q] = 1  ------------------------------------------> sees 1 ...
//   measured = s+1 -------------> goes on                    goes on
//
// The ranks measure when they make the group, and again in a large operation once a quarter of a second has
// passed. Rank 0 writes `measure_from` = s before it publishes the large operation s-1, so every rank knows
// in operation s that it has to measure. All ranks are in s then (Call::match()). Rank 0 waits at most
// `patience` for each pair. If a peer sleeps or has no core, the answer does not change. The slowest pair
// counts.
//
// [Note: one answer for an operation] All ranks must take the same route. `answers` holds two answers and the
// operation from which the second one holds. Rank 0 alone writes it, in operation s for s+1. A rank leaves
// the measure in s after that, so it has the new word in s+1; asked late for s, it gets the first answer of
// the new word, which is the second of the old one. Rank 0 writes the next word after it has seen all headers
// of a later operation, so after all ranks have left s.
#pragma once

#include <chrono>
#include <cstdint>

#include "group_memory.h"
#include "identity.h"
#include "wait.h"

namespace pycomm {

// The hand-off between two threads of this process, in seconds, for callers without a group. Negative: the
// threads had only one core.
double hand_off_between_threads();
// In seconds. A line takes 25 to 60 ns within a cache and 190 to 250 ns between caches (EPYC, Zen 3).
inline constexpr double farthest_of_one_cache = 110e-9;
// Whether this hand-off is one between caches; `otherwise` if it is negative.
bool is_far(double seconds, bool otherwise, double farthest = farthest_of_one_cache);

class HandOff {
 public:
  using Duration = std::chrono::steady_clock::duration;
  struct Pace {
    Duration every = std::chrono::milliseconds(250);
    Duration patience = std::chrono::microseconds(20);  // of rank 0, with each rank
    double farthest = farthest_of_one_cache;
  };

  HandOff(const Identity& identity, GroupMemory& memory, Waiting& waiting)
      : HandOff(identity, memory, waiting, Pace{}) {}
  HandOff(const Identity& identity, GroupMemory& memory, Waiting& waiting, const Pace& pace)
      : rank_(identity.rank),
        world_size_(identity.world_size),
        pace_(pace),
        memory_(memory),
        waiting_(waiting) {}

  // As the group is made. Rank 0's guess, before it says `joined`: whether the cores are far from each other,
  // by what the system says of the caches.
  void guess(bool far);
  void begin(const WaitScope& scope);  // all ranks at a time, before operation 1

  bool kernel_ahead(uint64_t sequence) const;  // in this operation
  double seconds() const;  // the last hand-off that was measured; below 0: none

  // For operations that are large on all ranks: before this rank publishes it; whether all ranks measure in
  // it.
  void before(uint64_t sequence);
  bool is_due(uint64_t sequence) const;
  void measure(uint64_t sequence, const WaitScope& scope);  // all ranks at a time

 private:
  double slowest() const;  // of all pairs with rank 0; below 0: one did not answer
  void answer(uint64_t sequence, const WaitScope& scope);

  const int rank_, world_size_;
  const Pace pace_;
  GroupMemory& memory_;
  Waiting& waiting_;
  std::chrono::steady_clock::time_point next_{};  // rank 0: no measure before
};

}  // namespace pycomm
