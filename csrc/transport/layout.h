// layout.h -- what lies where in the shared memory of a group.
//
//   | GroupHeader | RankControl x n | StorePage x n |
//   | per rank: 2 OpSlots, 2 part tables, staging | channels n x (n-1) |
//
// [Note: two operation slots] Operation number s of the group uses slot s & 1 of every rank. A rank publishes
// operation s only after it has completed all operations before s. So whoever has seen every rank's header of
// operation s-1 knows that all ranks have finished reading slot (s-2) & 1 == s & 1, and may overwrite its own
// without asking.
//
// [Note: one line carries data and flag] The first cache line of an OpSlot holds the header that peers
// compare and up to 40 bytes of payload. `key` is stored last with release order; a reader that acquires it
// sees the rest, and one line travels.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pycomm {

inline constexpr size_t cache_line = 64;
inline constexpr size_t inline_bytes = 40;  // payload in the header's own line
inline constexpr size_t slot_payload_bytes =
    8192;  // payload behind the header: what one-shot operations can publish at issue
inline constexpr int max_lanes = 8;
inline constexpr uint32_t no_buffer = 0xffffffff;
inline constexpr size_t note_bytes = 2560;  // in the header of a group, for its rank 0 to write
inline constexpr uint64_t layout_version = 14;

// What must be equal on all ranks (op/fingerprint.h). The upper half of `key` is the sequence number.
struct alignas(cache_line) OpSlot {
  std::atomic<uint64_t> key;
  uint64_t count;
  uint64_t extra;
  std::byte inline_payload[inline_bytes];

  // Second line: the registered regions that hold this rank's buffers; 0: not (all) in one, no_buffer: there
  // are none.
  alignas(cache_line) uint32_t in_region;
  uint32_t out_region;
  uint32_t out_of_reach;  // 1: the kernel cannot copy from one of them; transport/kernel_copy.h
  // Where this rank is traced: when it published the operation, and which one (the lower half of its number).
  uint32_t traced;
  uint64_t published_ns;

  alignas(cache_line) std::byte payload[slot_payload_bytes];
};

struct PartRef {
  uint64_t address;  // in the owner's address space
  uint64_t nbytes;
};

enum class RankState : uint32_t { absent, joined, ready, closed };

struct alignas(cache_line) PaddedCounter {
  std::atomic<uint64_t> value;
};

inline constexpr uint32_t keen_helper = 2;

struct alignas(cache_line) RankControl {
  // Sleepers wait on `doorbell`; see wait.h.
  std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleepers;
  // The owner's worker sleeps on `helper_bell`; see wait.h, [Note: two bells].
  std::atomic<uint32_t> helper_bell;
  std::atomic<uint32_t> helpers;  // 0: awake, 1: asleep, keen_helper: asleep and keen

  alignas(cache_line) std::atomic<RankState> state;
  std::atomic<uint32_t> cma_ok;  // this rank can read and write every peer's memory
  uint64_t process_token;  // random per process: equal for ranks that are threads of one process
  uint64_t probe_address;  // where process_token lies in the owner's address space
  uint64_t probe_target;  // where peers try to write there
  int32_t pid;
  alignas(cache_line)
      std::atomic<int32_t> core;  // where the owner ran when it last published or waited; -1 unknown
  std::atomic<int64_t> heartbeat_ns;  // CLOCK_MONOTONIC of the owner's last pass through a slow wait; see
                                      // [Note: who is to blame]

  // communicator/monitored_barrier.h
  alignas(cache_line) std::atomic<uint64_t> barrier_calls;  // that this rank has begun
  std::atomic<uint64_t> barrier_arrival;
  std::atomic<uint64_t> barrier_verdict;  // by rank 0
  std::atomic<uint64_t> device_barriers;  // that this rank has begun; cuda/group.h

  // survivors.h
  alignas(cache_line) std::atomic<uint64_t> survivors_arrived;  // the last round to which the owner has come
  std::atomic<uint64_t> survivors_formed;  // the last round in which it has the new group

  // Copies from or to buffers of peers that the owner has under way; collectives/visit.h.
  alignas(cache_line) std::atomic<uint32_t> visits;
  // Callers of the owner that wait for a message, and so take whatever comes; collectives/send_recv.h.
  std::atomic<uint32_t> attending;
  // Eager messages that the owner sent and whose recv did not agree, so far; each has an acknowledgement.
  std::atomic<uint32_t> deferred_errors;

  // How fast a line comes here from rank 0's core; hand_off.h.
  alignas(cache_line) std::atomic<uint64_t> ball;

  // Pipeline progress of each lane, counted in steps since the group was created; see collectives/pipeline.h.
  PaddedCounter filled[max_lanes];
  PaddedCounter reduced[max_lanes];
  PaddedCounter drained[max_lanes];
};

struct alignas(cache_line) GroupHeader {
  uint64_t version;
  uint32_t world_size;
  // Why the group is broken; see [Note: who writes the reason] in health.h.
  alignas(cache_line) std::atomic<uint32_t> broken;
  uint32_t kind;
  int32_t reporter;
  int32_t peer;
  uint32_t op;
  uint64_t sequence;
  char text[320];
  alignas(cache_line) std::atomic<uint64_t> survivors;  // how far they are; survivors.h
  // Whether a copy by the kernel beats two through shared memory; hand_off.h. Rank 0 writes.
  alignas(cache_line) std::atomic<uint64_t> answers;
  std::atomic<double> hand_off_ns;
  std::atomic<uint64_t> measure_from;  // the operation
  std::atomic<uint64_t> measured;  // one more than the operation in which it was done last
  // What rank 0 has to say to all (TransportOptions::write_note); complete before it says `joined`.
  alignas(cache_line) std::byte note[note_bytes];
};

// page_store.h
struct alignas(cache_line) StorePage {
  std::atomic<uint64_t> version;  // odd while its owner writes
  std::atomic<uint64_t> nbytes;
  alignas(cache_line) std::atomic<uint64_t> words[2040];
};

// --- send and recv: one channel per ordered pair (src, dst), see collectives/send_recv.h ---
inline constexpr int channel_slots = 8;
inline constexpr size_t message_inline_bytes = 960;
inline constexpr int channel_segments = 4;
inline constexpr size_t longest_ring = 2 << 20;

// eager: like in_slot, but the send is complete already. again: `address` is the id of a message that was
// in_place; its data are streamed now.
enum class MessageMode : uint32_t { eager, in_slot, streamed, in_place, again };

struct alignas(cache_line) MessageSlot {
  std::atomic<uint64_t> id;  // 1, 2, ... in order of sending; stored last
  uint64_t count;
  uint64_t address;  // in_place: in the sender's address space; again: see MessageMode
  int32_t tag;
  uint32_t dtype;
  MessageMode mode;
  uint32_t region;
  std::byte payload[message_inline_bytes];
};

inline constexpr uint8_t send_again = 2;

// Half a cache line.
struct Acknowledgement {
  uint64_t id;
  uint64_t count;  // what the receiver expected
  // Of an eager message, because its sender keeps no copy: `sent_count`, `sent_dtype`, `tag`. An eager
  // message is acknowledged only if it differs from its recv.
  uint64_t sent_count;
  int32_t tag;
  uint8_t dtype;
  uint8_t sent_dtype;
  uint8_t matched;  // 0, 1, or send_again: the receiver may not copy from the sender's memory
  uint8_t eager;  // 1: such a message
};
static_assert(2 * sizeof(Acknowledgement) == cache_line);

struct alignas(cache_line) Channel {
  alignas(cache_line) std::atomic<uint64_t> taken;  // messages that dst has taken out of `slots`
  std::atomic<uint64_t> eager_matched;  // eager messages that have matched a recv
  PaddedCounter bytes_filled;  // bytes that src has put into the data ring
  PaddedCounter bytes_drained;  // bytes that dst has taken out of it
  PaddedCounter acks_sent;  // by dst
  PaddedCounter acks_seen;  // by src
  PaddedCounter copying;  // 1 while dst copies from src's own memory; [Note: withdrawn messages], send_recv.h
  PaddedCounter withdrawn;  // 1 when src no longer keeps the memory of its messages
  Acknowledgement acks[channel_slots];
  MessageSlot slots[channel_slots];
};

inline constexpr size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

struct Layout {
  int world_size;
  size_t staging_bytes;  // per rank, for collectives
  size_t ring_bytes;  // per channel, data ring

  // `budget` = all memory that one rank owns for moving data: slots, staging and outgoing rings. Very many
  // ranks need more than they ask for: each half of each lane must hold a cache line per rank and one for a
  // result.
  //
  // [Note: longer than a second level cache] A line that the reader still has in its own second level cache
  // costs its writer twice to three times as much as one that has gone to the third level (docs/log.md). So
  // rings are 2 MiB long where the budget allows it: what comes round again has left the reader's cache.
  static Layout make(int world_size, size_t budget, int lanes) {
    const size_t peers = world_size > 1 ? world_size - 1 : 1;
    const size_t least =
        std::max<size_t>(32 << 10, lanes * round_up(2 * (world_size + 2) * cache_line, 4096));
    const size_t fixed = 2 * sizeof(OpSlot) + peers * sizeof(Channel);
    const size_t left = std::max(budget, fixed + least) - fixed;
    Layout layout{};
    layout.world_size = world_size;
    layout.ring_bytes = std::clamp<size_t>(left / 2 / peers / 4096 * 4096, 4096, longest_ring);
    const size_t rings = layout.ring_bytes * peers;
    layout.staging_bytes = std::max(least, left > rings ? (left - rings) / 4096 * 4096 : 0);
    return layout;
  }

  size_t controls() const { return round_up(sizeof(GroupHeader), 4096); }
  size_t pages() const { return round_up(controls() + world_size * sizeof(RankControl), 4096); }
  size_t ranks() const { return round_up(pages() + world_size * sizeof(StorePage), 4096); }
  size_t tables_bytes() const { return round_up(2 * 2 * world_size * sizeof(PartRef), cache_line); }
  size_t rank_stride() const { return round_up(2 * sizeof(OpSlot) + tables_bytes() + staging_bytes, 4096); }
  size_t channels() const { return ranks() + world_size * rank_stride(); }
  size_t channel_stride() const { return round_up(sizeof(Channel) + ring_bytes, 4096); }
  size_t total() const {
    return channels() + static_cast<size_t>(world_size) * (world_size - 1) * channel_stride();
  }
};

}  // namespace pycomm
