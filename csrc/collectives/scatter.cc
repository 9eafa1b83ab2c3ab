// scatter.cc -- rank r's `out` becomes the root's in_parts[r].
//
//   payload  the root publishes all parts with its header.
//   staged   the root fills compartment p with the block for rank p; every rank takes its own.
//   direct   every rank copies its part straight from the root's buffer.
#include "collectives.h"
#include "pipeline.h"

namespace pycomm {

void scatter(Call& call, const Choice& choice, Route route) {
  const Op& op = call.op;
  const bool root = call.rank == op.root;
  const int n = call.world_size, rank = call.rank;
  if (route == Route::payload) {
    call.match();
    if (op.count) std::memmove(op.out, call.payload(op.root, rank * op.nbytes()), op.nbytes());
    return;
  }
  call.on_lanes(op.nbytes(), [&](int lane, size_t begin, size_t nbytes) {
    if (choice.algorithm == Algorithm::direct) {
      call.match();
      if (!root) call.fetch(op.root, rank, begin, op.out + begin, nbytes);
      leave_direct(call, lane);
    } else {
      const Compartments step = compartments(call, nbytes, choice.block / n, false);
      const size_t block = step.block;
      const Halves halves(call, lane, step.footprint());
      auto size = [&](size_t i) { return std::min(block, nbytes - i * block); };
      pipeline(
          call, halves, (nbytes + block - 1) / block,
          [&](size_t i, std::byte* half) {
            for (int p = 0; root && p < n; ++p)
              if (p != rank) std::memcpy(half + p * block, op.in_parts[p].data + begin + i * block, size(i));
          },
          NoStage{},
          [&](size_t i, std::byte*) {
            if (!root) std::memcpy(op.out + begin + i * block, halves.of(op.root, i) + rank * block, size(i));
          });
    }
    if (root && op.in_parts[rank].data != op.out && nbytes)
      std::memcpy(op.out + begin, op.in_parts[rank].data + begin, nbytes);
  });
}

}  // namespace pycomm
