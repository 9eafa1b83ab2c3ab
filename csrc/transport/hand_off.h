// hand_off.h -- how long a cache line takes from the core of one rank to that of another, and what follows:
// whether one copy by the kernel beats two through shared memory.
//
// Through shared memory every line changes hands twice, written by one core and read by another; a copy by
// the kernel moves it once but looks up every page. Where the cores share a cache a line takes some 30 ns and
// two copies are ahead, unless the kernel copies fast (kernel_copy.h); between caches it takes 200 ns and one
// copy is ahead. Which of the two holds is measured, because it is not known: a virtual machine's cores move
// between caches within seconds, and what it says of its caches may be wrong.
//
//   rank 0                        rank p                     rank q           ball[p]
//   ball[p] = 1  ---------------> sees 1, ball[p] = 2        waits            1, 2
//   sees 2, ball[p] = 3  -------> sees 3, ball[p] = 4        waits            3, 4     ... `rounds` times
//   ball[q] = 1  ------------------------------------------> sees 1 ...
//   measured = s+1 -------------> goes on                    goes on
//
// When: as the group is made, and in the first large operation after a quarter of a second. Rank 0 sees that
// it is time when it publishes a large operation s-1, and writes `measure_from` = s before; so every rank
// knows it in operation s, where all of them are there (Call::match()) and none computes. Rank 0 waits at
// most `patience` for a pair: a peer that sleeps or has no core costs that much, and the answer stays what it
// was. The slowest pair counts.
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

// A line that two threads of this process hand to each other; for those who ask without a group. Seconds,
// below 0: they had no two cores.
double hand_off_between_threads();
// 25 to 60 ns there, 190 to 250 between two (EPYC, Zen 3).
inline constexpr double farthest_of_one_cache = 110e-9;
// Whether that is a way between caches. below 0: `otherwise`.
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
