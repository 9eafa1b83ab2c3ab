// ring.h -- the movement common to ring algorithms: every rank sends to rank+1 and receives from rank-1, in
// `steps` steps.
//
// The data of a step are cut into segments; a segment is passed on as soon as it has arrived, so the steps
// overlap (item k = step * segments + segment). A lane's staging is `ring_slots` slots; item k lies in slot
// k % ring_slots of its sender. The sender waits for credit: the receiver must have drained item
// k - ring_slots. At most ring_slots / 2 segments per step keep a rank from filling all slots before it looks
// at what it received, which would stop the ring for good. Source: Patarasuk and Yuan, "Bandwidth optimal
// all-reduce algorithms for clusters of workstations", JPDC 2009.
#pragma once

#include "pipeline.h"

namespace pycomm {

inline constexpr int ring_slots = 8;
inline constexpr int ring_segments = ring_slots / 2;

inline size_t ring_slot_bytes(const Call& call) {
  return call.lane_bytes() / ring_slots / cache_line * cache_line;
}

// first(segment, to): writes what this rank sends in step 0.
// forward(step, segment, from, to): has received `from` in this step; writes what it sends in the next one
// (to is null after the last).
template <class First, class Forward>
void ring_pass(Call& call, int lane, int steps, int segments, const First& first, const Forward& forward) {
  const int next = (call.rank + 1) % call.world_size,
            prev = (call.rank + call.world_size - 1) % call.world_size;
  Transport& transport = call.transport;
  LaneState& state = call.comm.lane(lane);
  const uint64_t base = state.steps;
  const size_t slot_bytes = ring_slot_bytes(call);
  auto counter = [&](int p, PaddedCounter(RankControl::* stage)[max_lanes]) -> std::atomic<uint64_t>& {
    return (transport.control(p).*stage)[lane].value;
  };
  auto slot = [&](int p, uint64_t k) { return call.staging(p, lane) + (base + k) % ring_slots * slot_bytes; };
  auto await = [&](int p, PaddedCounter(RankControl::* stage)[max_lanes], uint64_t value) {
    transport.wait_for(
        p, [&](int q) { return counter(q, stage).load(std::memory_order_acquire) >= value; }, call.scope);
  };
  auto send = [&](uint64_t k, auto&& write) {
    if (base + k >= ring_slots) await(next, &RankControl::drained, base + k - ring_slots + 1);
    write(slot(call.rank, k));
    counter(call.rank, &RankControl::filled).store(base + k + 1, std::memory_order_release);
    transport.notify(next);
  };

  call.match();  // all ranks are done with the staging of earlier operations
  for (int s = 0; s < segments; ++s)
    if (steps > 0) send(s, [&](std::byte* to) { first(s, to); });
  for (int t = 0; t < steps; ++t)
    for (int s = 0; s < segments; ++s) {
      const uint64_t k = static_cast<uint64_t>(t) * segments + s;
      await(prev, &RankControl::filled, base + k + 1);
      if (t + 1 < steps) send(k + segments, [&](std::byte* to) { forward(t, s, slot(prev, k), to); });
      else forward(t, s, slot(prev, k), nullptr);
      counter(call.rank, &RankControl::drained).store(base + k + 1, std::memory_order_release);
      transport.notify(prev);
    }
  state.drained = base + static_cast<uint64_t>(steps) * segments;
  Progress{call, lane}.finish(state.drained);
}

}  // namespace pycomm
