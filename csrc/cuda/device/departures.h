// departures.h -- when memory that other processes have mapped may be freed: [Note: end of exported memory]
// in peer_memory.h.
//
// Parked memory is of the whole process and has a lock of its own, inside which that of spare.h is taken.
#pragma once

#include <atomic>
#include <memory>

#include "../../communicator/communicator.h"
#include "device_memory.h"
#include "topology.h"

namespace pycomm::cuda {

// One word per rank in shared memory: not 0 once the rank has unmapped its peers for good. A rank that died
// has lost its record lock ([Note: liveness by record locks] in memory/life.h), which is held on here: the
// memory may outlive the group.
class Departures {
 public:
  explicit Departures(Communicator& comm);  // collective

  void depart() { word(rank_).store(1, std::memory_order_release); }
  // Has every other rank departed or died?
  bool complete(const Topology& topology) const;

 private:
  bool departed(int rank, bool by_death) const;
  std::atomic_ref<uint32_t> word(int rank) const;

  int rank_;
  size_t stride_;
  std::shared_ptr<SharedMemory> memory_;
  Lives lives_;
};

// Keeps `memory` until all peers have departed.
void park(DeviceMemory memory, std::shared_ptr<Departures> departures, const Topology& topology);
// Frees what is parked and needed no more. Returns how many blocks are left in this process.
int free_parked();

}  // namespace pycomm::cuda
