// regions.h -- registered memory: pieces of shared memory that every rank has mapped, of `stride` bytes per
// rank and a count behind them. Ids start at 1.
//
// [Note: end of a registered region] Each rank frees its part when it likes, with its tensor: no later
// operation finds the part, and its pages are given back. Peers may use theirs meanwhile, and a worker thread
// of this rank may just be at one through this rank's mapping. So a region is unmapped only when all ranks
// have freed their parts; they count that behind the parts. Each rank looks with every region that it adds or
// drops. In a group that is broken, or that a peer has left, an operation may have ended here and not yet
// there: it unmaps at its end.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "health.h"

namespace pycomm {

class Regions {
 public:
  Regions(const Identity& identity, const Health& health) : identity_(identity), health_(health) {}

  // An id is the same on all ranks. next() is the first that this rank has not used; the ranks take the
  // largest, so that what one of them has missed leaves no two regions under one id.
  uint32_t next() const;
  // bases: of each rank's part, in its own address space.
  void add(uint32_t region, std::shared_ptr<SharedMemory> memory, size_t stride, std::vector<uint64_t> bases);
  void drop(uint32_t region);  // not collective

  uint32_t find(const void* address, size_t nbytes) const;  // 0: none
  // Where this process has what lies at `address` of a peer's own address space; nullptr: unknown region.
  std::byte* map(uint32_t region, int peer, uint64_t address) const;
  // What `peer` has at the place of its part where this rank has `address` in its own; an address in this
  // process.
  std::byte* at_peer(uint32_t region, int peer, const void* address) const;

  static size_t bytes(size_t stride, int world_size) { return stride * world_size + count_bytes; }

 private:
  static constexpr size_t count_bytes = 4096;
  struct Region {
    std::shared_ptr<SharedMemory> memory;
    size_t stride = 0;
    std::vector<uint64_t> bases;  // of each rank, in its own address space
    bool dropped = false;  // by this rank

    std::byte* at(int peer, uint64_t offset) const { return memory->data() + peer * stride + offset; }
  };
  std::atomic_ref<uint32_t> num_dropped(const Region& region) const;
  void unmap_dropped();  // with the lock

  const Identity& identity_;
  const Health& health_;
  std::map<uint32_t, Region> regions_;
  uint32_t last_ = 0;
  mutable std::mutex mutex_;
  std::atomic<int> live_{0};
};

}  // namespace pycomm
