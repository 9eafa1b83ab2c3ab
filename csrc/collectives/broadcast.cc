// broadcast.cc -- every rank's `out` becomes the root's `in`.
//
//   payload  the root publishes the data with its header.
//   staged   the root fills a half, all others take it while the root fills the other: each byte is copied
//            once by the root and once by every receiver, all of them reading the same cached lines.
//   direct   every receiver copies straight from the root's buffer: one copy.
#include "collectives.h"
#include "pipeline.h"

namespace pycomm {

void broadcast(Call& call, const Choice& choice, Route route) {
  const Op& op = call.op;
  const bool root = call.rank == op.root;
  if (root && op.out && op.out != op.in && op.count) std::memcpy(op.out, op.in, op.nbytes());
  if (route == Route::payload) {
    call.match();
    if (!root && op.count) std::memcpy(op.out, call.payload(op.root), op.nbytes());
    return;
  }
  call.on_lanes(op.nbytes(), [&](int lane, size_t begin, size_t nbytes) {
    if (choice.algorithm == Algorithm::direct) {
      call.match();
      if (!root) call.fetch(op.root, 0, begin, op.out + begin, nbytes);
      return leave_direct(call, lane);
    }
    const size_t block = multicast_block(call, nbytes, choice.block);
    const Halves halves(call, lane, block);
    auto size = [&](size_t i) { return std::min(block, nbytes - i * block); };
    pipeline(
        call, halves, (nbytes + block - 1) / block,
        [&](size_t i, std::byte* half) {
          if (root) std::memcpy(half, op.in + begin + i * block, size(i));
        },
        NoStage{},
        [&](size_t i, std::byte*) {
          if (!root) std::memcpy(op.out + begin + i * block, halves.of(op.root, i), size(i));
        });
  });
}

}  // namespace pycomm
