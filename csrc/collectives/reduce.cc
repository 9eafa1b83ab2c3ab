// reduce.cc -- the root's `out` becomes the reduction of all inputs.
//
//   payload   every rank publishes its input with its header; the root reduces all.
//   two_shot  rank r reduces chunk r of each block, as in all_reduce; only the root takes the results. All
//             ranks share the arithmetic.
//   direct    rank r reduces chunk r straight out of all inputs and writes it into the root's output.
#include "../arithmetic/reduce.h"
#include "collectives.h"
#include "pipeline.h"
#include "visit.h"

namespace pycomm {

namespace {

constexpr size_t direct_block = 64 << 10;

void two_shot(Call& call, int lane, size_t begin, size_t nbytes, size_t preferred) {
  const Op& op = call.op;
  const int n = call.world_size, rank = call.rank;
  const Compartments step = compartments(call, longest_chunk(nbytes, n), preferred / n, true);
  const size_t compartment = step.block, block = compartment * n;
  const Halves halves(call, lane, step.footprint());
  auto chunk = [&](size_t i, int p) {
    size_t start = i * block, length = std::min(block, nbytes - start);
    Range range = chunk_of(length / call.item, p, n, call.item);
    return Range{begin + start + range.begin * call.item, begin + start + range.end * call.item};
  };
  pipeline(
      call, halves, (nbytes + block - 1) / block,
      [&](size_t i, std::byte* half) {
        for (int k = 1; k < n; ++k) {
          const int p = (rank + k) % n;
          Range range = chunk(i, p);
          std::memcpy(half + p * compartment, op.in + range.begin, range.size());
        }
      },
      [&](size_t i, std::byte* half) {
        Range range = chunk(i, rank);
        const void* sources[max_world_size];
        for (int p = 0; p < n; ++p)
          sources[p] = p == rank ? op.in + range.begin : halves.of(p, i) + rank * compartment;
        call.reduce_into(half + n * compartment, sources, range.size() / call.item);
      },
      [&](size_t i, std::byte*) {
        if (rank != op.root) return;
        for (int k = 0; k < n; ++k) {
          const int p = (rank + k) % n;
          Range range = chunk(i, p);
          if (range.size())
            std::memcpy(op.out + range.begin, halves.of(p, i) + n * compartment, range.size());
        }
      });
}

void direct(Call& call, int lane, size_t begin, size_t nbytes) {
  call.match();
  const Op& op = call.op;
  const int n = call.world_size, rank = call.rank;
  const size_t block = std::min(direct_block, call.lane_bytes() / (n + 1) / cache_line * cache_line);
  Range mine = chunk_of(nbytes / call.item, rank, n, call.item);
  for (size_t at = mine.begin * call.item; at < mine.end * call.item; at += block) {
    const size_t length = std::min(block, mine.end * call.item - at), offset = begin + at;
    const Visit visit(call);
    const void* sources[max_world_size];
    for (int p = 0; p < n; ++p) {
      if (p == rank) {
        sources[p] = op.in + offset;
      } else if (const std::byte* in = call.mapped(p, false, 0)) {
        sources[p] = in + offset;
      } else {
        std::byte* scratch = call.staging(rank, lane) + p * block;
        call.fetch(p, 0, offset, scratch, length);
        sources[p] = scratch;
      }
    }
    std::byte* result = rank == op.root ? op.out + offset : call.staging(rank, lane) + n * block;
    call.reduce_into(result, sources, length / call.item);
    visit.finish();
    if (rank != op.root) call.put(op.root, 0, offset, result, length);
  }
  leave_direct(call, lane);
}

}  // namespace

void reduce_to_root(Call& call, const Choice& choice, Route route) {
  if (route == Route::payload) {
    call.match();
    if (call.rank != call.op.root) return;
    const void* sources[max_world_size];
    for (int p = 0; p < call.world_size; ++p) sources[p] = call.payload(p);
    return call.reduce_into(call.op.out, sources, call.op.count);
  }
  call.on_lanes(call.op.nbytes(), [&](int lane, size_t begin, size_t nbytes) {
    if (choice.algorithm == Algorithm::direct) direct(call, lane, begin, nbytes);
    else two_shot(call, lane, begin, nbytes, choice.block);
  });
}

}  // namespace pycomm
