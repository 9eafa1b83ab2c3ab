// pipeline.h -- the staged route: data stream through two halves of shared memory that stay in cache.
//
// An operation is cut into steps. In step i a rank *fills* its own half i & 1 from the user's input, may
// *reduce* what all ranks have filled into the half's result area, and *takes* from the peers' halves into
// the user's output. One counter per stage and rank says how far it is; counters never go back, so a step has
// the same number for the whole life of the group.
//
//          step 0      step 1      step 2
//   fill   ====        ====        ====             own half    <- user input
//   reduce       ====        ====        ====       own result  <- all halves       waits: all have filled i
//   take               ====        ====       ====  user output <- peers' results   waits: all have reduced i
//
// Order inside a rank: fill(i+1), reduce(i), take(i-1); without a reduce stage fill(i+1), take(i).
//
// [Note: when a half may be overwritten] fill(i) overwrites what peers read in step i-2: it waits until all
// have passed the stage that reads the filled area (reduce, or take without a reduce stage) of step i-2;
// reduce(i) waits until all have taken step i-2. At the start of an operation: whoever has seen all headers
// of it knows that all peers completed everything before ([Note: two operation slots]). So only fill(0),
// which runs before the headers are awaited, has to look: the half it writes was last read in the previous
// operation but one step, or (after an algorithm that uses staging otherwise) in its very last step.
// [Note: places in a half] Steps lie one behind the other in a half, and begin again at its start when they
// have come round: a place that is filled again has then left the second level cache of those who read it
// ([Note: longer than a second level cache] in transport/layout.h). Where a step lies follows from its number
// and the bytes that it takes, which are equal on all ranks.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "call.h"

namespace pycomm {

struct Progress {
  Call& call;
  int lane;

  PaddedCounter* counters(int peer, PaddedCounter (RankControl::*stage)[max_lanes]) const {
    return &(call.transport.control(peer).*stage)[lane];
  }
  auto reached(PaddedCounter (RankControl::*stage)[max_lanes], uint64_t step) const {
    return [this, stage, step](int p) {
      return counters(p, stage)->value.load(std::memory_order_acquire) >= step;
    };
  }
  // Release: what was written or read before is done when a peer sees the new value.
  void announce(PaddedCounter (RankControl::*stage)[max_lanes], uint64_t step) const {
    counters(call.rank, stage)->value.store(step, std::memory_order_release);
    call.transport.notify_if_last(reached(stage, step));
  }
  // Ends an operation: whatever stages this rank had in it, its counters stand at the last step.
  void finish(uint64_t step) const {
    call.comm.lane(lane).steps = step;
    counters(call.rank, &RankControl::filled)->value.store(step, std::memory_order_relaxed);
    counters(call.rank, &RankControl::reduced)->value.store(step, std::memory_order_relaxed);
    announce(&RankControl::drained, step);  // a peer that is ahead may wait for it in its next operation
  }
  void await(PaddedCounter (RankControl::*stage)[max_lanes], uint64_t step) const {
    call.transport.wait_all(reached(stage, step), call.scope);
  }
};

struct NoStage {
  void operator()(size_t, std::byte*) const {}
};

// Where the steps of an operation lie in the staging of the ranks. `footprint`: the bytes that one step takes
// there, equal on all ranks.
class Halves {
 public:
  Halves(const Call& call, int lane, size_t footprint)
      : call_(call),
        lane_(lane),
        base_(call.comm.lane(lane).steps),
        footprint_(footprint),
        places_(std::max<size_t>(1, std::min(call.half_bytes(), round_of_places / 2) / footprint)) {}

  int lane() const { return lane_; }
  uint64_t base() const { return base_; }  // the number of step 0
  std::byte* of(int peer, size_t i) const {
    const uint64_t step = base_ + i;
    return call_.staging(peer, lane_) + (step & 1) * call_.half_bytes() + (step >> 1) % places_ * footprint_;
  }

 private:
  static constexpr size_t round_of_places = 4 << 20;

  const Call& call_;
  const int lane_;
  const uint64_t base_;
  const size_t footprint_, places_;
};

// fill(i, own half), reduce(i, own half), take(i): `steps` times each. Pass NoStage for a stage that this
// operation has not on any rank; a stage that only some ranks have is a lambda that does nothing on the
// others.
template <class Fill, class Reduce, class Take>
void pipeline(Call& call, const Halves& halves, size_t steps, const Fill& fill, const Reduce& reduce,
              const Take& take) {
  constexpr bool reduces = !std::is_same_v<Reduce, NoStage>;
  constexpr bool takes = !std::is_same_v<Take, NoStage>;
  const Progress progress{call, halves.lane()};
  LaneState& state = call.comm.lane(halves.lane());
  const uint64_t base = halves.base();
  auto half = [&](size_t i) { return halves.of(call.rank, i); };
  constexpr auto filled = &RankControl::filled, reduced = &RankControl::reduced,
                 drained = &RankControl::drained;
  constexpr auto read_out = reduces ? reduced : drained;  // the stage after which the filled area is free

  auto run_fill = [&](size_t i) {
    if (i == 0) progress.await(drained, state.drained);
    if (i >= 2) progress.await(read_out, base + i - 1);
    fill(i, half(i));
    progress.announce(filled, base + i + 1);
  };
  auto run_reduce = [&](size_t i) {
    progress.await(filled, base + i + 1);
    if (takes && i >= 2) progress.await(drained, base + i - 1);
    reduce(i, half(i));
    progress.announce(reduced, base + i + 1);
  };
  auto run_take = [&](size_t i) {
    progress.await(reduces ? reduced : filled, base + i + 1);
    take(i, half(i));
    progress.announce(drained, base + i + 1);
  };

  if (steps > 0) run_fill(0);
  try {
    call.match();
  } catch (...) {
    // The group goes on after a mismatch, and this step number will be used again. Peers look at the counter
    // only after they have matched this rank's next header, which is stored after this.
    progress.counters(call.rank, filled)->value.store(base, std::memory_order_release);
    throw;
  }
  for (size_t i = 0; i < steps; ++i) {
    if (i + 1 < steps) run_fill(i + 1);
    if constexpr (reduces) run_reduce(i);
    if constexpr (takes) {
      if (!reduces) run_take(i);
      else if (i >= 1) run_take(i - 1);
    }
  }
  if constexpr (reduces && takes) {
    if (steps > 0) run_take(steps - 1);
  }

  if (steps > 0) state.drained = base + steps - 1;
  progress.finish(base + steps);
}

// Ends a direct operation: returns when no peer needs this rank's buffers any more.
inline void leave_direct(Call& call, int lane) {
  const Progress progress{call, lane};
  LaneState& state = call.comm.lane(lane);
  state.drained = state.steps + 1;
  progress.finish(state.drained);
  progress.await(&RankControl::drained, state.drained);
}

// --- the two ways of filling

// Multicast: every rank puts the same block in front of all peers. Returns the bytes per step, of `nbytes` in
// all.
inline size_t multicast_block(const Call& call, size_t nbytes, size_t preferred) {
  const size_t most = std::min(preferred, call.half_bytes()) / cache_line * cache_line;
  return std::clamp(round_up(nbytes, cache_line), cache_line, most);
}

// Pairwise: a step is cut into world_size compartments, the p-th one for peer p, plus (with a reduce stage)
// one for the result. `nbytes` in all go through each, step by step.
struct Compartments {
  size_t count;
  size_t block;  // bytes of one
  size_t footprint() const { return count * block; }
};
inline Compartments compartments(const Call& call, size_t nbytes, size_t preferred, bool with_result) {
  const size_t count = call.world_size + with_result;
  const size_t most =
      std::max<size_t>(cache_line, std::min(preferred, call.half_bytes() / count) / cache_line * cache_line);
  return {count, std::clamp(round_up(nbytes, cache_line), cache_line, most)};  // fits: see Layout::make
}

}  // namespace pycomm
