// plan.h -- from a call to what is enqueued: pure functions, so that the tests on a CPU run the very plans
// that a GPU gets.
//
//   choose            which algorithm, by size and by what the machine can do
//   plan_collective   the steps of this rank for a collective: launches, and between them nothing (resident),
//                     exchanges by stream memory operations (stream_ordered), or copies by the copy engine
//   plan_message      the same for a send or a recv
//
// Ranks plan alone. All that a plan depends on is equal on all ranks, or is announced and compared on the
// device (announce.h).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "announce.h"
#include "kernels/launch.h"
#include "protocol.h"

namespace pycomm::cuda {

// The group as one rank plans for it.
struct Shape {
  Group group{};
  Protocol protocol = Protocol::resident;
  int blocks = 1;  // of a launch, at most
  int blocks_of_message = message_blocks;  // likewise
  bool messages_in_order = false;  // also where collectives are resident (budget.h)
  bool pointers = false;  // peers address any buffer of this rank: all ranks are threads of one process
  bool multicast = false;
  int rank() const { return group.rank; }
  int world_size() const { return group.world_size; }
};

// Where a buffer lies that a call was given.
struct BufferLookup {
  // A handle for peers (handle_of_region), or nothing for memory that is not registered.
  std::function<std::optional<uint64_t>(const void*, size_t)> handle = [](const void*, size_t) {
    return std::nullopt;
  };
  // Of registered memory: the address that reaches this place on all ranks; nullptr: there is none.
  std::function<std::byte*(const void*)> multicast = [](const void*) { return nullptr; };
  // Of the same place in the registered memory of `rank`; nullptr: unknown.
  std::function<std::byte*(const void*, int)> at_peer = [](const void*, int) { return nullptr; };
};

struct Step {
  enum class What {
    launch,
    sync,  // with all ranks, in stream order, by stream memory operations
    post,  // to `peer`: the next half-turn of a message
    await,  // the same from `peer`
    copy,  // by the copy engine
  };
  What what = What::sync;
  KernelKey key{};
  int blocks = 1, threads = max_threads;
  Args args{};
  int peer = 0;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  size_t nbytes = 0;
};

struct CudaChoice {
  Algorithm algorithm;
  std::string reason;
};

// What one rank enqueues for one call.
struct LaunchPlan {
  CudaChoice choice;
  bool sends = false;  // a message: this is the sender's end
  bool in_order = false;  // its kernels never wait; stream memory operations order them
  std::vector<Step> steps;
};

bool has_cuda_algorithm(OpKind kind, Algorithm algorithm);
// nbytes: as select() in collectives/select.h.
CudaChoice choose(OpKind kind, size_t nbytes, const Shape& shape, const KernelKey& reduction, bool registered,
                  Algorithm requested);

// Where the reduction of (dtype, op) is done: the kernel's types and the factor by which counts grow (complex
// sums).
struct ReductionKey {
  DType dtype;
  ReduceOp op;
};
ReductionKey reduction_key(DType dtype, ReduceOp op);

// Throws std::invalid_argument when the op cannot be done with the algorithm asked for.
LaunchPlan plan_collective(const Op& op, const Shape& shape, const BufferLookup& buffers,
                           uint64_t timeout_ns);

struct MessageCall {
  bool sends;
  int peer, tag;
  DType dtype;
  std::byte* data;
  size_t count;
  size_t nbytes() const { return count * size_of(dtype); }
};
LaunchPlan plan_message(const MessageCall& message, const Shape& shape, const BufferLookup& buffers,
                        uint64_t timeout_ns);

// What the plans share. The first: segment_bytes where nothing passes through the staging.
inline constexpr uint64_t whole_slice = uint64_t{1} << 40;
inline constexpr uint64_t bytes_worth_a_block = 32 << 10;

// Bytes and places in an arena, from the staging that is wanted per rank.
struct ArenaShape {
  uint64_t words_bytes, staging_offset, half_bytes, message_offset, message_bytes, nbytes;
};
ArenaShape arena_shape(int world_size, size_t staging_bytes);

}  // namespace pycomm::cuda
