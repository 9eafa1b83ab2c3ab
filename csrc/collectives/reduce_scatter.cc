// reduce_scatter.cc -- rank r's `out` becomes the reduction of every rank's in_parts[r]; part sizes may
// differ (uneven).
//
//   payload  every rank publishes all its parts; each reduces its own.
//   staged   compartment p of a half carries the block of in_parts[p]; rank r reduces compartment r of all
//            peers' halves with its own input straight into `out`. Every rank sends (n-1)/n of its input and
//            nothing else: half the bytes of an all_reduce.
//   ring     partial sums travel around the ring (ring.h), the order of summation is cyclic; n-1 steps.
//   direct   rank r reduces part r straight out of all inputs.
#include "../arithmetic/reduce.h"
#include "collectives.h"
#include "pipeline.h"
#include "ring.h"
#include "visit.h"

namespace pycomm {

namespace {

constexpr size_t direct_block_mapped = 64 << 10;
constexpr size_t direct_block_kernel = 128 << 10;

void staged(Call& call, int lane, size_t begin, size_t nbytes, size_t preferred) {
  const Op& op = call.op;
  const int n = call.world_size, rank = call.rank;
  const Compartments step = compartments(call, nbytes, preferred / n, false);
  const size_t block = step.block;
  const Halves halves(call, lane, step.footprint());
  auto piece = [&](size_t i, int p) {
    return clip(begin + i * block, std::min(block, nbytes - i * block), op.in_parts[p].count * call.item);
  };
  pipeline(
      call, halves, (nbytes + block - 1) / block,
      [&](size_t i, std::byte* half) {
        for (int k = 1; k < n; ++k) {
          const int p = (rank + k) % n;
          Range range = piece(i, p);
          if (range.size()) std::memcpy(half + p * block, op.in_parts[p].data + range.begin, range.size());
        }
      },
      [&](size_t i, std::byte*) {
        Range range = piece(i, rank);
        const void* sources[max_world_size];
        for (int p = 0; p < n; ++p)
          sources[p] = p == rank ? op.in_parts[rank].data + range.begin : halves.of(p, i) + rank * block;
        call.reduce_into(op.out + range.begin, sources, range.size() / call.item);
      },
      NoStage{});
}

void direct(Call& call, int lane, size_t begin, size_t nbytes) {
  call.match();
  const Op& op = call.op;
  const int n = call.world_size, rank = call.rank;
  const size_t block = call.all_mapped()
                           ? direct_block_mapped
                           : std::min(direct_block_kernel, call.lane_bytes() / n / cache_line * cache_line);
  Range mine = clip(begin, nbytes, op.in_parts[rank].count * call.item);
  for (size_t at = mine.begin; at < mine.end; at += block) {
    const size_t length = std::min(block, mine.end - at);
    const Visit visit(call);
    const void* sources[max_world_size];
    for (int k = 0; k < n; ++k) {
      const int p = (rank + k) % n;
      if (p == rank) {
        sources[p] = op.in_parts[rank].data + at;
      } else if (const std::byte* in = call.mapped(p, false, rank)) {
        sources[p] = in + at;
      } else {
        std::byte* scratch = call.staging(rank, lane) + p * block;
        call.fetch(p, rank, at, scratch, length);
        sources[p] = scratch;
      }
    }
    call.reduce_into(op.out + at, sources, length / call.item);
    visit.finish();
  }
  leave_direct(call, lane);
}

void ring(Call& call, int lane, size_t begin, size_t nbytes) {
  const Op& op = call.op;
  const int n = call.world_size, rank = call.rank;
  const size_t slot = ring_slot_bytes(call), block = slot * ring_segments;
  for (size_t start = 0; start < nbytes; start += block) {
    auto piece = [&](int p, int s) {
      size_t from = start + s * slot;
      return clip(begin + from, from < nbytes ? std::min(slot, nbytes - from) : 0,
                  op.in_parts[p].count * call.item);
    };
    ring_pass(
        call, lane, n - 1, ring_segments,
        [&](int s, std::byte* to) {
          const int p = (rank - 1 + n) % n;
          Range range = piece(p, s);
          if (range.size()) std::memcpy(to, op.in_parts[p].data + range.begin, range.size());
        },
        [&](int t, int s, const std::byte* from, std::byte* to) {
          const int p = (rank - 2 - t + 2 * n) % n;
          Range range = piece(p, s);
          if (range.size() == 0) return;
          const bool last = t == n - 2;
          const void* sources[2] = {from, op.in_parts[p].data + range.begin};
          ReduceOp reduce_op = op.reduce_op == ReduceOp::avg && !last ? ReduceOp::sum : op.reduce_op;
          std::byte* sum = last ? op.out + range.begin : to;
          reduce({op.dtype, reduce_op, static_cast<double>(n)}, sources, 2, sum, range.size() / call.item);
        });
  }
}

}  // namespace

void reduce_scatter(Call& call, const Choice& choice, Route route) {
  const Op& op = call.op;
  const int n = call.world_size;
  if (route == Route::payload) {
    call.match();
    size_t offset = 0;
    for (int p = 0; p < call.rank; ++p) offset += op.in_parts[p].count * call.item;
    const void* sources[max_world_size];
    for (int p = 0; p < n; ++p) sources[p] = call.payload(p, offset);
    return call.reduce_into(op.out, sources, op.in_parts[call.rank].count);
  }
  size_t longest = 0;
  for (const Part& part : op.in_parts) longest = std::max(longest, part.count * call.item);
  call.on_lanes(longest, [&](int lane, size_t begin, size_t nbytes) {
    if (choice.algorithm == Algorithm::direct) return direct(call, lane, begin, nbytes);
    if (choice.algorithm == Algorithm::ring && n > 1) return ring(call, lane, begin, nbytes);
    staged(call, lane, begin, nbytes, choice.block);
  });
}

}  // namespace pycomm
