// fake_processors.h -- which blocks the fake device holds at one time.
//
// A multiprocessor has 65536 registers and 2048 threads. A block starts when one of them has room for it, in
// order of its number, and keeps the room until its last thread ends, spinning or not; so blocks that do not
// fit start when others end, or never. Threads are counted as asked for, although the fibers are fewer.
//
// Of this process: what processes share under MPS is not modelled.
#pragma once

#include <vector>

#include "fiber.h"

namespace pycomm::cuda {

// The room of one launch. Used by the fibers of one OS thread.
class FakeSeats {
 public:
  FakeSeats(int device, int blocks, int threads, int registers);
  ~FakeSeats();  // also of a launch that was cut short
  FakeSeats(const FakeSeats&) = delete;

  // Of each thread of a block, before and after it runs.
  void enter(fiber::FiberCtx& c);
  void leave(const fiber::FiberCtx& c);

 private:
  bool take(int block);
  void give_back(int block);

  const int device_, threads_, registers_;
  int next_ = 0;  // the first block without a seat
  std::vector<int> processor_;  // by block; -1: none yet
  std::vector<int> ended_;  // threads
  std::vector<uint64_t> seated_;  // words to wait for
};

// The most blocks that this process has had on one device at a time.
int fake_most_blocks();

}  // namespace pycomm::cuda
