// gather.cc -- the root's out_parts[p] becomes the `in` of rank p.
//
//   payload  every rank publishes its part with its header; the root copies all.
//   staged   every rank fills its half, the root takes from all.
//   direct   the root copies straight from the others' buffers.
#include "collectives.h"
#include "pipeline.h"

namespace pycomm {

void gather(Call& call, const Choice& choice, Route route) {
  const Op& op = call.op;
  const bool root = call.rank == op.root;
  const int n = call.world_size;
  if (route == Route::payload) {
    call.match();
    for (int p = 0; root && op.count && p < n; ++p)
      std::memmove(op.out_parts[p].data, call.payload(p), op.nbytes());
    return;
  }
  call.on_lanes(op.nbytes(), [&](int lane, size_t begin, size_t nbytes) {
    if (choice.algorithm == Algorithm::direct) {
      call.match();
      for (int p = 0; root && p < n; ++p)
        if (p != call.rank) call.fetch(p, 0, begin, op.out_parts[p].data + begin, nbytes);
      leave_direct(call, lane);
    } else {
      const size_t block = multicast_block(call, nbytes, choice.block);
      const Halves halves(call, lane, block);
      auto size = [&](size_t i) { return std::min(block, nbytes - i * block); };
      pipeline(
          call, halves, (nbytes + block - 1) / block,
          [&](size_t i, std::byte* half) {
            if (!root) std::memcpy(half, op.in + begin + i * block, size(i));
          },
          NoStage{},
          [&](size_t i, std::byte*) {
            for (int p = 0; root && p < n; ++p)
              if (p != call.rank)
                std::memcpy(op.out_parts[p].data + begin + i * block, halves.of(p, i), size(i));
          });
    }
    if (root && op.out_parts[call.rank].data != op.in && nbytes)
      std::memcpy(op.out_parts[call.rank].data + begin, op.in + begin, nbytes);
  });
}

}  // namespace pycomm
