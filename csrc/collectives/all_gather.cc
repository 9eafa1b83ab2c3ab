// all_gather.cc -- out_parts[p] of every rank becomes the `in` of rank p; sizes may differ from rank to rank
// (uneven).
//
//   payload  every rank publishes its part with its header.
//   staged   every rank fills its half with a block of its part, then takes the blocks of all others: one
//            copy in, n-1 copies out.
//   ring     parts travel around the ring (ring.h); n-1 steps.
//   direct   every rank copies straight from the others' buffers: n-1 copies.
#include "collectives.h"
#include "pipeline.h"
#include "ring.h"

namespace pycomm {

namespace {

void staged(Call& call, int lane, size_t begin, size_t nbytes, size_t preferred) {
  const Op& op = call.op;
  const size_t block = multicast_block(call, nbytes, preferred);
  const Halves halves(call, lane, block);
  auto piece = [&](size_t i, int p) {
    return clip(begin + i * block, std::min(block, nbytes - i * block), op.out_parts[p].count * call.item);
  };
  pipeline(
      call, halves, (nbytes + block - 1) / block,
      [&](size_t i, std::byte* half) {
        Range range = piece(i, call.rank);
        if (range.size()) std::memcpy(half, op.in + range.begin, range.size());
      },
      NoStage{},
      [&](size_t i, std::byte*) {
        for (int k = 1; k < call.world_size; ++k) {
          const int p = (call.rank + k) % call.world_size;
          Range range = piece(i, p);
          if (range.size()) std::memcpy(op.out_parts[p].data + range.begin, halves.of(p, i), range.size());
        }
      });
}

void ring(Call& call, int lane, size_t begin, size_t nbytes) {
  const Op& op = call.op;
  const int n = call.world_size;
  const size_t slot = ring_slot_bytes(call), block = slot * ring_segments;
  for (size_t start = 0; start < nbytes; start += block) {
    auto piece = [&](int p, int s) {
      size_t from = start + s * slot;
      return clip(begin + from, from < nbytes ? std::min(slot, nbytes - from) : 0,
                  op.out_parts[p].count * call.item);
    };
    ring_pass(
        call, lane, n - 1, ring_segments,
        [&](int s, std::byte* to) {
          Range range = piece(call.rank, s);
          if (range.size()) std::memcpy(to, op.in + range.begin, range.size());
        },
        [&](int t, int s, const std::byte* from, std::byte* to) {
          const int p = (call.rank - 1 - t + 2 * n) % n;
          Range range = piece(p, s);
          if (range.size() == 0) return;
          std::memcpy(op.out_parts[p].data + range.begin, from, range.size());
          if (to) std::memcpy(to, from, range.size());
        });
  }
}

}  // namespace

void all_gather(Call& call, const Choice& choice, Route route) {
  const Op& op = call.op;
  const int n = call.world_size;
  if (route == Route::payload) {
    call.match();
    for (int p = 0; p < n; ++p)
      if (op.out_parts[p].count)
        std::memmove(op.out_parts[p].data, call.payload(p), op.out_parts[p].count * call.item);
    return;
  }
  size_t longest = 0;
  for (const Part& part : op.out_parts) longest = std::max(longest, part.count * call.item);
  const Part& own = op.out_parts[call.rank];
  call.on_lanes(longest, [&](int lane, size_t begin, size_t nbytes) {
    Range mine = clip(begin, nbytes, own.count * call.item);
    switch (choice.algorithm) {
      case Algorithm::direct:
        call.match();
        for (int k = 1; k < n; ++k) {
          const int p = (call.rank + k) % n;
          Range range = clip(begin, nbytes, op.out_parts[p].count * call.item);
          call.fetch(p, 0, range.begin, op.out_parts[p].data + range.begin, range.size());
        }
        leave_direct(call, lane);
        break;
      case Algorithm::ring: ring(call, lane, begin, nbytes); break;
      default: staged(call, lane, begin, nbytes, choice.block);
    }
    if (mine.size() && own.data != op.in) std::memcpy(own.data + mine.begin, op.in + mine.begin, mine.size());
  });
}

}  // namespace pycomm
