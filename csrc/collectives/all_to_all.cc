// all_to_all.cc -- out_parts[p] of rank r becomes in_parts[r] of rank p; sizes may differ pairwise (uneven).
//
//   payload  every rank publishes all its parts with its header (even sizes).
//   staged   compartment p of a half carries a block for rank p.
//   direct   every rank copies its parts straight from the others' buffers.
// Uneven sizes are in the part tables, which match() compares pair by pair; all ranks then know the longest
// part and so the number of steps.
#include "collectives.h"
#include "pipeline.h"

namespace pycomm {

void all_to_all(Call& call, const Choice& choice, Route route) {
  const Op& op = call.op;
  const int n = call.world_size, rank = call.rank;
  if (route == Route::payload) {
    call.match();
    for (int p = 0; p < n; ++p)
      if (op.count) std::memcpy(op.out_parts[p].data, call.payload(p, rank * op.nbytes()), op.nbytes());
    return;
  }
  const Part &own_in = op.in_parts[rank], &own_out = op.out_parts[rank];
  call.on_lanes(op.uneven ? call.longest_pair() : op.nbytes(), [&](int lane, size_t begin, size_t nbytes) {
    auto clipped = [&](size_t from, size_t length, const Part& part) {
      return clip(begin + from, length, part.count * call.item);
    };
    if (choice.algorithm == Algorithm::direct) {
      call.match();
      for (int k = 1; k < n; ++k) {
        const int p = (rank + k) % n;
        Range range = clipped(0, nbytes, op.out_parts[p]);
        call.fetch(p, rank, range.begin, op.out_parts[p].data + range.begin, range.size());
      }
      leave_direct(call, lane);
    } else {
      const Compartments step = compartments(call, nbytes, choice.block / n, false);
      const size_t block = step.block;
      const Halves halves(call, lane, step.footprint());
      pipeline(
          call, halves, (nbytes + block - 1) / block,
          [&](size_t i, std::byte* half) {
            for (int k = 1; k < n; ++k) {
              const int p = (rank + k) % n;
              Range range = clipped(i * block, std::min(block, nbytes - i * block), op.in_parts[p]);
              if (range.size())
                std::memcpy(half + p * block, op.in_parts[p].data + range.begin, range.size());
            }
          },
          NoStage{},
          [&](size_t i, std::byte*) {
            for (int k = 1; k < n; ++k) {
              const int p = (rank + k) % n;
              Range range = clipped(i * block, std::min(block, nbytes - i * block), op.out_parts[p]);
              if (range.size())
                std::memcpy(op.out_parts[p].data + range.begin, halves.of(p, i) + rank * block, range.size());
            }
          });
    }
    Range range = clipped(0, nbytes, own_out);
    if (range.size()) std::memcpy(own_out.data + range.begin, own_in.data + range.begin, range.size());
  });
}

}  // namespace pycomm
