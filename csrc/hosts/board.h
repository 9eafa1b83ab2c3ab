// board.h -- which ranks of other hosts have closed the group, for all ranks of this host to read. The leader
// writes what the other leaders tell it (speaker.h).
#pragma once

#include <atomic>

#include "../communicator/registered.h"

namespace pycomm {

class Board {
 public:
  // Collective among the ranks of the host.
  Board(Communicator& inside, int world_size)
      : buffer_(allocate_registered(inside, world_size * sizeof(Word))),
        words_(reinterpret_cast<Word*>(inside.transport().at_peer(buffer_.region, 0, buffer_.data))) {}

  void note_closed(int rank) { words_[rank].store(1, std::memory_order_release); }
  bool closed(int rank) const { return words_[rank].load(std::memory_order_acquire) != 0; }

 private:
  using Word = std::atomic<uint32_t>;
  const RegisteredBuffer buffer_;
  Word* const words_;
};

}  // namespace pycomm
