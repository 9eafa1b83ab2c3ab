// sync_words.h -- how ranks order themselves by stream memory operations: the words and what is done with
// them.
//
// Words lie in host memory that all ranks share. Each has one writer of 1 and one reader, who waits for 1 and
// writes 0 again; so the same operations can be replayed by a CUDA graph for ever, which counters could not.
//
//   exchange (all ranks)                             half-turns (a message)
//
//   for each peer p: word[set][me -> p] = 1          sender:    word[s][me -> p] = 1
//   for each peer p: wait word[set][p -> me] == 1    receiver:  wait for that word == 1, then = 0; copy;
//   for each peer p: word[set][p -> me] = 0                     word[r][me -> p] = 1
//                                                    sender:    wait for that word == 1, then = 0
//
// Exchanges use two sets in turn. With one, a fast rank's 1 of the next exchange could come before a slow
// peer writes its 0 of this one, and be lost. With two, the rank has passed the exchange in between, so the
// peer has written that 0. Half-turns alternate by nature: neither end writes 1 before it has seen the
// other's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycomm::cuda {

struct WordOperation {
  bool waits;  // for the value; else it is written
  size_t word;
  uint32_t value;
};

// Two sets for exchanges, one for senders' and one for receivers' half-turns.
inline constexpr int num_sync_sets = 4;
inline size_t sync_words(int world_size) {
  return num_sync_sets * static_cast<size_t>(world_size) * world_size;
}
inline size_t sync_word(int world_size, int set, int from, int to) {
  return (static_cast<size_t>(set) * world_size + from) * world_size + to;
}
inline constexpr int set_of_senders = 2, set_of_receivers = 3;

inline std::vector<WordOperation> exchange_of(int rank, int world_size, uint64_t number) {
  const int set = number & 1;
  std::vector<WordOperation> operations;
  auto each = [&](bool waits, bool mine, uint32_t value) {
    for (int k = 1; k < world_size; ++k) {
      const int p = (rank + k) % world_size;
      operations.push_back({waits, sync_word(world_size, set, mine ? rank : p, mine ? p : rank), value});
    }
  };
  each(false, true, 1);
  each(true, false, 1);
  each(false, false, 0);
  return operations;
}

// This end's turn, for the other end to see.
inline WordOperation half_turn(int rank, int peer, int world_size, bool sends) {
  return {false, sync_word(world_size, sends ? set_of_senders : set_of_receivers, rank, peer), 1};
}
// The other end's turn, taken note of.
inline std::vector<WordOperation> half_turn_awaited(int rank, int peer, int world_size, bool sends) {
  const size_t word = sync_word(world_size, sends ? set_of_receivers : set_of_senders, peer, rank);
  return {{true, word, 1}, {false, word, 0}};
}

}  // namespace pycomm::cuda
