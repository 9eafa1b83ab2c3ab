// fake_processors.cc -- see fake_processors.h.
#include "fake_processors.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "fake_driver.h"

namespace pycomm::cuda {

namespace {

constexpr int registers_each = 65536, threads_each = 2048;

struct Processor {
  int registers = registers_each, threads = threads_each;
};

struct Processors {
  std::mutex mutex;
  std::map<int, std::vector<Processor>> of_device;
  int blocks = 0, most_blocks = 0;
};

// Never destroyed: streams may end later than static objects do.
Processors& processors() {
  static auto* all = new Processors;
  return *all;
}

// A warp has registers in units of 256.
int registers_of_block(int threads, int registers) {
  return (threads + 31) / 32 * ((registers * 32 + 255) / 256 * 256);
}

}  // namespace

FakeSeats::FakeSeats(int device, int blocks, int threads, int registers)
    : device_(device),
      threads_(threads),
      registers_(registers_of_block(threads, registers)),
      processor_(blocks, -1),
      ended_(blocks),
      seated_(blocks) {}

FakeSeats::~FakeSeats() {
  for (size_t block = 0; block < processor_.size(); ++block) give_back(static_cast<int>(block));
}

void FakeSeats::enter(fiber::FiberCtx& c) {
  const int block = c.block();
  while (!seated_[block]) {
    if (block == next_ && take(block)) {
      ++next_;
      c.store_relaxed(&seated_[block], 1, Scope::gpu);
    } else {
      c.relax(&seated_[block]);
    }
  }
}

void FakeSeats::leave(const fiber::FiberCtx& c) {
  if (++ended_[c.block()] == c.threads()) give_back(c.block());
}

bool FakeSeats::take(int block) {
  Processors& all = processors();
  std::lock_guard lock(all.mutex);
  std::vector<Processor>& here = all.of_device[device_];
  here.resize(fake_settings().multiprocessors);
  for (size_t p = 0; p < here.size(); ++p) {
    if (here[p].registers < registers_ || here[p].threads < threads_) continue;
    here[p].registers -= registers_;
    here[p].threads -= threads_;
    processor_[block] = static_cast<int>(p);
    all.most_blocks = std::max(all.most_blocks, ++all.blocks);
    return true;
  }
  return false;
}

void FakeSeats::give_back(int block) {
  if (processor_[block] < 0) return;
  Processors& all = processors();
  std::lock_guard lock(all.mutex);
  Processor& processor = all.of_device[device_][processor_[block]];
  processor.registers += registers_;
  processor.threads += threads_;
  processor_[block] = -1;
  --all.blocks;
}

int fake_most_blocks() {
  std::lock_guard lock(processors().mutex);
  return processors().most_blocks;
}

}  // namespace pycomm::cuda
