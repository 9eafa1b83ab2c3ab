// topology.h -- which rank sits on which device of which process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../communicator/communicator.h"
#include "driver.h"

namespace pycomm::cuda {

// Where one rank runs. Exchanged as bytes.
struct Place {
  uint64_t process;  // drawn at random by each process: equal for ranks that are threads of one process
  int32_t pid;
  int32_t device;  // ordinal in that process
  Uuid uuid;  // of the device; of the MIG instance where there is one
  int32_t capability;  // 90 for sm_90
  int32_t multiprocessors;
  int32_t connections;  // CUDA_DEVICE_MAX_CONNECTIONS; 0: unset
  uint8_t mps;
  uint8_t stream_memory_operations;
  uint8_t multicast;
  uint8_t posix_fd_handles;
  uint8_t mig;
  uint8_t unused[3];

  bool same_process(const Place& other) const { return process == other.process; }
  bool same_device(const Place& other) const;
};

// How many of the ranks sit on the device of `at`; `one_process`: of those, the threads of the same process.
int count_on_device(const std::vector<Place>& places, const Place& at, bool one_process);

struct Topology {
  std::vector<Place> places;  // of every rank
  int rank = 0;

  const Place& here() const { return places[rank]; }
  int ranks_on_device(int of_rank) const;
  int ranks_on_my_device() const { return ranks_on_device(rank); }
  bool one_process() const;
  bool own_devices() const;  // no two ranks share one
  std::string describe() const;  // "4 ranks, 4 processes, 1 device; here sm_90, 132 multiprocessors"

  // Collective. `connections`: CUDA_DEVICE_MAX_CONNECTIONS, 0 if unset. A rank that cannot use its device
  // makes an error on all ranks.
  static Topology gather(Communicator& comm, Device device, int connections);
};

}  // namespace pycomm::cuda
