// call.h -- one operation while it runs: what all collectives share.
//
// Every operation begins alike, whatever its kind and size:
//   publish   write key, count and extra (and the payload, when all of it fits) into this rank's OpSlot; no
//             waiting
//   match     wait for every rank's header and compare; a difference raises on every rank, naming both sides
// so a mismatch of any two calls is found before any result is written, all ranks come to the same verdict,
// and the group goes on with the next operation. After that the algorithms part.
//
// [Note: sizes on some ranks] In an all_to_all a rank that passes no sizes expects equal ones, and may meet
// ranks that pass theirs. No rank knows before the headers are there, and ranks without sizes may have copied
// their first step into the staging memory by then, laid out for equal sizes. So match() throws MixedSizes
// there, and all ranks stream the operation as one of uneven sizes, one step number later: what was filled is
// skipped.
#pragma once

#include <algorithm>
#include <chrono>

#include "../communicator/communicator.h"
#include "../op/chunk.h"
#include "../op/op.h"

namespace pycomm {

// Whether the data travel with the header, or as select.cc chooses once the headers are there; or it is an
// operation of several hosts (HostsSide).
enum class Route { payload, by_choice, across };

// See [Note: sizes on some ranks]. Thrown once for an operation, on ranks that have passed no sizes.
struct MixedSizes {};

class Call {
 public:
  Call(Communicator& comm, const Op& op, uint64_t sequence);

  Communicator& comm;
  Transport& transport;
  const Op& op;
  const int rank;
  const int world_size;
  const size_t item;  // bytes of one element
  const uint64_t sequence;  // of the operation here; errors speak of scope.op
  WaitScope scope;
  trace::Times* times = nullptr;  // of an operation that is measured

  // by_kernel: if the kernel can copy this rank's buffers, it may have to (only where not with_payload).
  void publish(bool with_payload, bool by_kernel);
  bool published(int peer) const;  // `peer` has published this operation
  bool headers_ready() const;
  void match();
  bool mixed() const { return mixed_; }  // after match(): [Note: sizes on some ranks]
  // all_to_all: what passes from src to dst, as one of the two says. Valid after match().
  size_t sent(int src, int dst) const { return part_bytes(src, false, dst); }
  size_t longest_pair();  // bytes; all_to_all with splits: of all n*n parts, after match()

  // One-shot: the bytes that `peer` published, from byte `offset` of its payload on. Valid after match().
  const std::byte* payload(int peer, size_t offset = 0) const;

  // Direct: buffers of peers. Valid after match(). `part` is an index into in_parts/out_parts, or 0.
  PartRef peer_part(int peer, bool output, int part) const {
    return transport.parts(peer, sequence, output)[part];
  }
  std::byte* mapped(int peer, bool output, int part) const;  // nullptr where only the kernel reaches it
  void fetch(int peer, int part, size_t offset, void* to, size_t nbytes) const;  // from a peer's input
  void put(int peer, int part, size_t offset, const void* from, size_t nbytes) const;  // into a peer's output
  bool registered(int peer) const;  // all buffers of `peer` in this operation lie in a registered region
  bool all_mapped() const;  // every buffer of this operation is addressable by every rank
  bool kernel_reaches_all() const;  // or the kernel can copy from it

  // Staging of one lane of one rank; its two halves alternate by step (pipeline.h).
  std::byte* staging(int peer, int lane) const { return transport.staging(peer) + lane * lane_bytes(); }
  size_t lane_bytes() const { return transport.staging_bytes() / transport.lanes() / 4096 * 4096; }
  size_t half_bytes() const { return lane_bytes() / 2; }

  // Splits `nbytes` (a multiple of item) over the lanes and runs body(lane, first byte, bytes) on each.
  void on_lanes(size_t nbytes, const std::function<void(int, size_t, size_t)>& body);

  // Reduces world_size sources in rank order into out.
  void reduce_into(void* out, const void* const* sources, size_t count) const;

 private:
  void publish_parts(bool by_kernel);
  void note_arrivals();
  void compare(int peer) const;
  void compare_splits() const;
  size_t part_bytes(int peer, bool output, int part) const;

  bool matched_ = false;
  bool mixed_ = false;
};

// Bytes of the longest of them when `nbytes` are cut so.
inline size_t longest_chunk(size_t nbytes, int chunks) {
  return round_up(round_up(nbytes, cache_line) / cache_line, chunks) / chunks * cache_line;
}

// The bytes of a part of `part_bytes` that fall into [begin, begin + nbytes).
inline Range clip(size_t begin, size_t nbytes, size_t part_bytes) {
  return {std::min(begin, part_bytes), std::min(begin + nbytes, part_bytes)};
}

}  // namespace pycomm
