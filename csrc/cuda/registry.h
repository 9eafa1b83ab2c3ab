// registry.h -- memory that all ranks of a group have mapped (pycomm.empty), by region: one registered
// buffer.
//
// A region has a number, the same on all ranks, and a row in a table on the device with the addresses that
// this rank has for it; so a handle {region, offset} means the same place everywhere (handle_of_region in
// kernels/layout.h).
//
// As on the CPU ([Note: end of a registered region] in transport/regions.h): until all ranks have dropped a
// region, kernels of this rank may reach the memory of peers in it, so it stays until the next allocate() or
// the end of the group.
//
// Regions are guarded by the group's lock (lock.h), which the caller holds; allocate() takes it itself, as it
// waits for the other ranks in between.
#pragma once

#include "device/peer_memory.h"
#include "lock.h"
#include "plan.h"
#include "setup.h"

namespace pycomm::cuda {

// A registered buffer, as its owner holds it.
struct Registered {
  std::shared_ptr<PeerMemory> memory;
  std::byte* data;
};

class Registry {
 public:
  Registry(const Setup& setup, GroupLock& lock) : setup_(setup), lock_(lock) {}

  void make();  // the table. Throws.
  const uint64_t* table() const { return reinterpret_cast<const uint64_t*>(table_); }

  Registered allocate(size_t nbytes);  // collective
  void drop(const std::byte* data);  // by its owner, when nothing that was issued uses it any more
  // What `peer` has at this place of registered memory; nullptr for other memory.
  std::byte* at_peer(const void* data, size_t nbytes, int peer) const;
  BufferLookup lookup() const;  // for plans
  bool multicast() const { return multicast_; }  // has any region been mapped so?

  void give_back();  // nothing may run on the device any more
  void keep_for_ever();  // the device does not stop, so it keeps what it may use

 private:
  struct Region {
    std::shared_ptr<PeerMemory> memory;
    std::byte* base = nullptr;
    size_t nbytes = 0;
    bool dropped = false;  // by this rank
  };
  struct Found {
    const Region* region;
    size_t id, offset;
  };
  size_t free_id();
  void write_row(size_t id, const PeerMemory& memory);
  std::optional<Found> find(const void* data, size_t nbytes) const;

  const Setup& setup_;
  GroupLock& lock_;
  DevicePtr table_ = 0;
  std::vector<Region> regions_;
  bool multicast_ = false;
};

}  // namespace pycomm::cuda
