// layout.h -- what ranks share in device memory, and the one struct that every kernel takes. Plain C++: host
// and device read the same file.
//
// Each rank owns one arena, which all peers address (../device/peer_memory.h):
//
//   arena(r)  | Control | words[2][max_ranks] | staging: 2 halves | message staging per peer |
//
//   Control   flags that peers write and the owner polls, so that waiting reads local memory; see
//             docs/memory_model.md
//   words     data and flag in one word, for small all_reduce (one_shot.cuh): one area for each parity of the
//             epoch and source
//   staging   buffers that peers cannot address themselves pass through here, cut up as below
//   messages  the same for send and recv, one area per destination
//
// [Note: epochs] Every operation has an epoch, 1 more than the one before; the last block to end a kernel
// writes it to Control::epoch, the next kernel reads it there. It is not a launch parameter because a CUDA
// graph replays its parameters. Flags carry epoch and step, never a mere count: after an operation that ended
// early (a mismatch) nothing is out of step, and a flag of an old operation is too small to be taken for a
// new one.
//
// [Note: parts] Sizes are in bytes from here on. A collective moves `parts`: part[q] of a buffer belongs to
// rank q. A part is cut into one slice per block, so that block b of one rank only ever talks to block b of
// others and no barrier over the whole grid is needed; a slice is cut into segments of segment_bytes, which
// pass through the two halves of the staging in turn:
//
//   part    |  slice 0      |  slice 1      |  slice 2      | ...      one block each
//   slice   | seg 0 | seg 1 | s 2 |                                    half 0, half 1, half 0
//
//   staging half = blocks x slots x segment_bytes: a slot per part that is exposed to peers, one more for a
//                  result they fetch
//
// Buffers that peers do address (direct_in, stores) skip the staging; then a slice is one segment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../types.h"
#include "ctx.cuh"

namespace pycomm::cuda {

inline constexpr int max_ranks = 16;  // of a group with CUDA tensors
inline constexpr int max_blocks = 64;  // of a launch
inline constexpr int max_threads = 512;  // of a block
inline constexpr int message_blocks = 8;  // of a send or recv
inline constexpr int ring_slots = 4;  // segments under way between two neighbours, per block
// Slices and segments are multiples of it: whole vectors, whole elements of any type.
inline constexpr size_t align_bytes = 128;

enum class Kernel : uint8_t {
  one_shot,
  two_shot,
  ring,
  multimem,
  copy_two_shot,
  move,
  open,
  close,
  send,
  recv
};

enum class Flag : uint8_t { filled, reduced, drained };
inline constexpr int num_flags = 3;

// What a rank tells each peer when it begins an operation. Value i travels as the 8-byte word {value, low
// half of the epoch}.
struct Header {
  static constexpr int num_values = 10;
  uint64_t words[num_values];
};

// The values of a Header, put together.
struct Announcement {
  uint64_t meta;  // kind, dtype, reduce op, algorithm, root, launch shape (../announce.h): equal on all ranks
  uint64_t count;  // equal on all ranks
  uint64_t extra;  // factor, tag or other facts: equal on all ranks; with `pairwise` the bytes that pass
                   // between the two
  uint64_t in;  // handle of what the receiver of this header reads, see resolve() in session.cuh
  uint64_t out;  // handle of where it stores the result of its part
};

struct alignas(16) Channel {  // one end of the messages between two ranks in one direction
  uint64_t epoch, ticket;
  Header headers[2];  // by parity of the epoch; written by the other end
  uint64_t flags[message_blocks];  // likewise: filled at the receiver, drained at the sender
  uint64_t gave_up;  // likewise: 1 for ever once its wait ended in vain
};

struct alignas(16) Control {
  uint64_t epoch;  // of the last operation that ended; written by this rank
  uint64_t ticket;  // blocks of the running kernel that have ended
  Header headers[2][max_ranks];  // by parity of the epoch; headers[..][r] is written by rank r
  uint64_t verdicts[2][max_ranks];  // likewise: epoch << 1 | whether rank r found a mismatch (pairwise sizes)
  // Likewise, by block of rank r: epoch << step_bits | step.
  uint64_t flags[num_flags][max_blocks][max_ranks];
  uint64_t gave_up[max_ranks];  // likewise: 1 for ever once a wait of rank r ended in vain
  Channel sending[max_ranks], receiving[max_ranks];  // by peer
};
inline constexpr int step_bits = 24;

// What went wrong, for the host: one record for collectives and one for each end of each channel, since these
// run beside each other.
// gave_up: a peer did, before this rank came.
enum class Fault : uint64_t { none, mismatch, timeout, protocol, gave_up };
struct ErrorRecord {
  uint64_t fault;  // Fault; written last, cleared by the host
  uint64_t epoch;
  uint64_t peer;  // that differs
  uint64_t missing;  // bit r: rank r did not come, or gave up
  Announcement here, there;  // mismatch
};
// In host memory that the device addresses.
struct ErrorWord {
  uint64_t stop;  // set by the host: every wait ends at once
  ErrorRecord records[1 + 2 * max_ranks];
};
PC_FN constexpr int record_of_sending(int peer) { return 1 + peer; }
PC_FN constexpr int record_of_receiving(int peer) { return 1 + max_ranks + peer; }

// The group as one rank addresses it. Made once.
struct Group {
  int rank, world_size;
  std::byte* arena[max_ranks];
  // Base addresses of registered buffers, [region * max_ranks + rank]; in device memory.
  const uint64_t* regions;
  ErrorWord* error;
  uint64_t words_bytes;  // of the words of one parity and source
  uint64_t staging_offset, half_bytes;
  uint64_t message_offset, message_bytes;  // of one peer's area: two halves
};

// Stages of a kernel, for launches that run only some of them (Protocol::stream_ordered in ../protocol.h).
// The headers of an operation are compared in every launch that reads what peers wrote.
inline constexpr uint32_t stage_announce = 1, stage_fill = 2, stage_verdict = 4, stage_reduce = 8,
                          stage_gather = 16, stage_end = 32;
inline constexpr uint32_t all_stages = 63;

// What avg does. Sums of signed integers run in the kernels of unsigned ones.
inline constexpr uint32_t divide_nothing = 0, divide_plain = 1, divide_signed = 2;

struct Args {
  Group group;
  Announcement call;  // in, out unused: see in_handle
  uint64_t timeout_ns;  // of each wait
  uint32_t stages;
  // 1: blocks of all ranks run together, so they wait by spinning. 0: what they wait for is there already.
  uint32_t resident;
  uint32_t first_segment, end_segment;
  uint64_t segment_bytes;
  int slots;  // of a half, per block
  int root;  // copy_two_shot: the source
  uint32_t exposes;  // bit t: rank t reads what this rank exposes
  uint32_t reads;  // bit p: this rank reads what rank p exposes
  uint32_t distinct;  // move: every reader has a part of its own (in_part[t]); 0: all read in_part[0]
  uint32_t direct_in;  // peers read in_part itself, not the staging
  uint32_t stores;  // two_shot: bit t: the result of part[rank] is stored straight into rank t's out
  uint32_t results;  // two_shot: results lie in slots for peers to read
  uint32_t fetch;  // two_shot: this rank reads them (in reduce only the root)
  uint32_t pairwise;  // sizes are known pairwise only: compare Header::extra per pair and share the verdict
  int peer;  // send, recv
  uint32_t premultiply, divide;  // divide: one of divide_...
  double factor;  // of premul_sum; divisor of avg
  uint64_t in_handle[max_ranks], out_handle[max_ranks];
  const std::byte* in_part[max_ranks];
  std::byte* out_part[max_ranks];
  // move: in_bytes[t] is what rank t reads from here, out_bytes[p] what this rank reads from rank p.
  // two_shot: in_bytes[q] is the size of part q.
  uint64_t in_bytes[max_ranks], out_bytes[max_ranks];
  std::byte *multicast_in, *multicast_out;  // multimem
};

// A handle is an address, or with the top bit set the region (15 bits) and the offset in it (48 bits) of a
// registered buffer, which every rank has mapped elsewhere.
constexpr uint64_t handle_of_region(uint64_t region, uint64_t offset) {
  return 1ull << 63 | region << 48 | offset;
}

// --- shapes, the same on host and device ---

PC_FN constexpr uint64_t round_up_to(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }
PC_FN constexpr uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Bytes of a slice of a part: all but the last are equal.
PC_FN constexpr uint64_t slice_bytes(uint64_t part_bytes, uint64_t blocks) {
  return round_up_to((part_bytes + blocks - 1) / blocks, align_bytes);
}

struct Span {
  uint64_t begin, size;
};

// Segment `s` of block b's slice of a part.
PC_FN constexpr Span segment_of(uint64_t part_bytes, int block, int blocks, uint64_t segment_bytes,
                                uint32_t s) {
  const uint64_t slice = slice_bytes(part_bytes, blocks);
  const uint64_t begin = least(slice * block, part_bytes), end = least(slice * (block + 1), part_bytes);
  const uint64_t from = least(begin + s * segment_bytes, end);
  return {from, least(segment_bytes, end - from)};
}

// Segments of block b's slice.
PC_FN constexpr uint32_t num_segments(uint64_t part_bytes, int block, int blocks, uint64_t segment_bytes) {
  const uint64_t slice = slice_bytes(part_bytes, blocks);
  const uint64_t begin = least(slice * block, part_bytes), end = least(slice * (block + 1), part_bytes);
  return static_cast<uint32_t>((end - begin + segment_bytes - 1) / segment_bytes);
}

PC_FN Control& control_of(const Group& group, int rank) {
  return *reinterpret_cast<Control*>(group.arena[rank]);
}

// The words that `source` writes into the arena of `rank`.
PC_FN std::byte* words_of(const Group& group, int rank, int source, uint64_t epoch) {
  return group.arena[rank] + sizeof(Control) + ((epoch & 1) * max_ranks + source) * group.words_bytes;
}

PC_FN std::byte* slot_of(const Args& a, int rank, int block, int slot, uint32_t step) {
  const uint64_t index = static_cast<uint64_t>(block) * a.slots + slot;
  return a.group.arena[rank] + a.group.staging_offset + (step & 1) * a.group.half_bytes +
         index * a.segment_bytes;
}

}  // namespace pycomm::cuda
