// all_reduce.cc -- every rank ends with the reduction of all inputs; `out` may be `in`.
//
// Five algorithms, all with the same bits on every rank:
//   payload   (8 KiB and less) every rank publishes its input with the header and reduces all: one exchange.
//   one_shot  the same through the staging, for sizes that exceed the header's payload: n reads per rank.
//   two_shot  reduce-scatter and all-gather in one pipeline: rank r reduces chunk r of each block. Moves
//             2(n-1)/n of the buffer. Source: Rabenseifner, "Optimization of collective reduction
//             operations", ICCS 2004, with staging for messages.
//   direct    rank r reduces chunk r straight out of all inputs and writes it into all outputs; two
//             synchronisations in all.
//   ring      reduce-scatter and all-gather by neighbours (ring.h); partial sums start at rank c+1 for chunk
//             c, so the order of summation, although fixed, differs from the other algorithms, and so may the
//             last bit.
//
//   two_shot, one block, n = 3; A = a0+a1+a2
//           rank 0        rank 1        rank 2
//   fill    .   b0  c0    a1  .   c1    a2  b2  .    compartments of the half; own chunk is not copied
//   reduce  [A]           [B]           [C]          own chunk of the user's buffer + the peers' halves
//   take    A   B   C     A   B   C     A   B   C    results of the peers
#include "../arithmetic/reduce.h"
#include "collectives.h"
#include "pipeline.h"
#include "ring.h"
#include "visit.h"

namespace pycomm {

namespace {

constexpr size_t direct_block_mapped =
    32 << 10;  // stays in L1/L2 between reduction and the copies into the peers' outputs
constexpr size_t direct_block_kernel = 128 << 10;  // large enough to pay for the system calls

void from_payload(Call& call) {
  call.match();
  const void* sources[max_world_size];
  for (int p = 0; p < call.world_size; ++p) sources[p] = call.payload(p);
  call.reduce_into(call.op.out, sources, call.op.count);
}

void one_shot(Call& call, int lane, size_t begin, size_t nbytes, size_t preferred) {
  const size_t block = multicast_block(call, nbytes, preferred);
  const size_t steps = (nbytes + block - 1) / block;
  const Halves halves(call, lane, block);
  auto size = [&](size_t i) { return std::min(block, nbytes - i * block); };
  pipeline(
      call, halves, steps,
      [&](size_t i, std::byte* half) { std::memcpy(half, call.op.in + begin + i * block, size(i)); },
      NoStage{},
      [&](size_t i, std::byte*) {
        const void* sources[max_world_size];
        for (int p = 0; p < call.world_size; ++p) sources[p] = halves.of(p, i);
        call.reduce_into(call.op.out + begin + i * block, sources, size(i) / call.item);
      });
}

void two_shot(Call& call, int lane, size_t begin, size_t nbytes, size_t preferred) {
  const int n = call.world_size, rank = call.rank;
  const Compartments step = compartments(call, longest_chunk(nbytes, n), preferred / n, true);
  const size_t compartment = step.block, block = compartment * n;
  const size_t steps = (nbytes + block - 1) / block;
  const Halves halves(call, lane, step.footprint());
  // Chunk p of step i, in bytes of the user's buffer.
  auto chunk = [&](size_t i, int p) {
    size_t start = i * block, length = std::min(block, nbytes - start);
    Range range = chunk_of(length / call.item, p, n, call.item);
    return Range{begin + start + range.begin * call.item, begin + start + range.end * call.item};
  };
  pipeline(
      call, halves, steps,
      [&](size_t i, std::byte* half) {
        for (int k = 1; k < n; ++k) {
          const int p = (rank + k) % n;
          Range range = chunk(i, p);
          std::memcpy(half + p * compartment, call.op.in + range.begin, range.size());
        }
      },
      [&](size_t i, std::byte* half) {
        Range range = chunk(i, rank);
        const void* sources[max_world_size];
        for (int p = 0; p < n; ++p)
          sources[p] = p == rank ? call.op.in + range.begin : halves.of(p, i) + rank * compartment;
        std::byte* result = half + n * compartment;
        call.reduce_into(result, sources, range.size() / call.item);
        if (range.size()) std::memcpy(call.op.out + range.begin, result, range.size());
      },
      [&](size_t i, std::byte*) {
        for (int k = 1; k < n; ++k) {
          const int p = (rank + k) % n;
          Range range = chunk(i, p);
          if (range.size())
            std::memcpy(call.op.out + range.begin, halves.of(p, i) + n * compartment, range.size());
        }
      });
}

void direct(Call& call, int lane, size_t begin, size_t nbytes) {
  call.match();
  const int n = call.world_size, rank = call.rank;
  const bool mapped = call.all_mapped();
  const size_t block = mapped
                           ? direct_block_mapped
                           : std::min(direct_block_kernel, call.lane_bytes() / n / cache_line * cache_line);
  Range mine = chunk_of(nbytes / call.item, rank, n, call.item);
  for (size_t at = mine.begin * call.item; at < mine.end * call.item; at += block) {
    const size_t length = std::min(block, mine.end * call.item - at), offset = begin + at;
    const Visit visit(call);
    const void* sources[max_world_size];
    for (int k = 0; k < n; ++k) {
      const int p = (rank + k) % n;
      if (p == rank) {
        sources[p] = call.op.in + offset;
      } else if (const std::byte* in = call.mapped(p, false, 0)) {
        sources[p] = in + offset;
      } else {
        std::byte* scratch = call.staging(rank, lane) + p * block;
        call.fetch(p, 0, offset, scratch, length);
        sources[p] = scratch;
      }
    }
    call.reduce_into(call.op.out + offset, sources, length / call.item);
    visit.finish();
    for (int k = 1; k < n; ++k) call.put((rank + k) % n, 0, offset, call.op.out + offset, length);
  }
  leave_direct(call, lane);
}

void ring(Call& call, int lane, size_t begin, size_t nbytes) {
  const int n = call.world_size, rank = call.rank;
  const size_t slot = ring_slot_bytes(call), block = slot * ring_segments * n;
  auto reduce_two = [&](const void* a, const void* b, void* out, size_t length, bool last) {
    const void* sources[2] = {a, b};
    ReduceOp op = call.op.reduce_op == ReduceOp::avg && !last ? ReduceOp::sum : call.op.reduce_op;
    reduce({call.op.dtype, op, static_cast<double>(n)}, sources, 2, out, length / call.item);
  };
  for (size_t start = 0; start < nbytes; start += block) {
    const size_t length = std::min(block, nbytes - start), count = length / call.item;
    auto segment = [&](int c, int s) {  // segment s of chunk c, in bytes of the user's buffer
      Range chunk = chunk_of(count, (c % n + n) % n, n, call.item);
      Range part = chunk_of(chunk.size(), s, ring_segments, call.item);
      return Range{begin + start + (chunk.begin + part.begin) * call.item,
                   begin + start + (chunk.begin + part.end) * call.item};
    };
    ring_pass(
        call, lane, 2 * (n - 1), ring_segments,
        [&](int s, std::byte* to) {
          Range range = segment(rank - 1, s);
          std::memcpy(to, call.op.in + range.begin, range.size());
        },
        [&](int t, int s, const std::byte* from, std::byte* to) {
          Range range = segment(rank - 2 - t, s);
          if (range.size() == 0) return;
          if (t < n - 2) return reduce_two(from, call.op.in + range.begin, to, range.size(), false);
          std::byte* out = call.op.out + range.begin;
          if (t == n - 2) reduce_two(from, call.op.in + range.begin, out, range.size(), true);
          else std::memcpy(out, from, range.size());
          if (to) std::memcpy(to, out, range.size());
        });
  }
}

}  // namespace

void all_reduce(Call& call, const Choice& choice, Route route) {
  if (route == Route::payload) return from_payload(call);
  call.on_lanes(call.op.nbytes(), [&](int lane, size_t begin, size_t nbytes) {
    switch (choice.algorithm) {
      case Algorithm::one_shot: return one_shot(call, lane, begin, nbytes, choice.block);
      case Algorithm::direct: return direct(call, lane, begin, nbytes);
      case Algorithm::ring:
        return call.world_size == 1 ? two_shot(call, lane, begin, nbytes, choice.block)
                                    : ring(call, lane, begin, nbytes);
      default: return two_shot(call, lane, begin, nbytes, choice.block);
    }
  });
}

}  // namespace pycomm
