// topology.h -- which rank sits on which device, and which protocol of the CUDA collectives that allows.
//
// resident         One kernel per operation; its blocks spin on flags that the kernels of the other ranks write. All blocks of all ranks
//                  must therefore run at the same time, or the group hangs:
//                    own device per rank                    always
//                    threads of one process on one device   blocks of all of them fit (one per SM), and every stream has a hardware queue
//                                                           of its own: else a launch waits behind a kernel that waits for it
//                    processes on one device                under MPS alone: without it their contexts take turns, and a kernel that
//                                                           waits for another process burns its whole time slice
// stream_ordered   Kernels never wait. Phases are ordered by stream memory operations (cuStreamWaitValue32, cuStreamWriteValue32), for
//                  which a context gives up its turn. Slower per operation, right for processes that share a device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../communicator.h"
#include "driver.h"
#include "layout.h"

namespace pycomm::cuda {

// Where one rank runs. Exchanged as bytes.
struct Place {
  uint64_t process;          // drawn at random by each process: equal for ranks that are threads of one process
  int32_t pid;
  int32_t device;            // ordinal in that process
  Uuid uuid;                 // of the device; of the MIG instance where there is one
  int32_t capability;        // 90 for sm_90
  int32_t multiprocessors;
  int32_t connections;       // CUDA_DEVICE_MAX_CONNECTIONS; 0: unset
  uint8_t mps;
  uint8_t stream_memory_operations;
  uint8_t multicast;
  uint8_t posix_fd_handles;
  uint8_t mig;
  uint8_t unused[3];

  bool same_process(const Place& other) const { return process == other.process; }
  bool same_device(const Place& other) const;
};

struct Topology {
  std::vector<Place> places;  // of every rank
  int rank = 0;

  const Place& here() const { return places[rank]; }
  int ranks_on_device(int of_rank) const;
  int ranks_on_my_device() const { return ranks_on_device(rank); }
  bool one_process() const;
  bool own_devices() const;   // no two ranks share one
  std::string describe() const;  // "4 ranks, 4 processes, 1 device; here sm_90, 132 multiprocessors"

  // Collective. `connections`: CUDA_DEVICE_MAX_CONNECTIONS, 0 if unset. A rank that cannot use its device makes an error on all ranks.
  static Topology gather(Communicator& comm, Device device, int connections);
};

enum class Requested { automatic, resident, stream_ordered };
enum class Protocol { resident, stream_ordered };
const char* to_string(Protocol protocol);

struct ProtocolChoice {
  Protocol protocol;
  int blocks;          // of a kernel, at most; equal on all ranks
  std::string reason;
};

inline constexpr int default_connections = 8;  // of the driver, where CUDA_DEVICE_MAX_CONNECTIONS is unset
inline constexpr int max_connections = 32;

// Pure: the verdict is the same on all ranks. Throws std::runtime_error with the way out where no protocol, or not the requested one, can
// work.
ProtocolChoice choose_protocol(const std::vector<Place>& places, int rank, Requested requested = Requested::automatic);

}  // namespace pycomm::cuda
