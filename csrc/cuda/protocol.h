// protocol.h -- how the ranks of a group wait for each other on the device: one of two protocols, chosen by
// where the ranks sit.
//
// resident         One kernel per operation; its blocks spin on flags that the kernels of the other ranks
//                  write. All blocks of all ranks must therefore run at the same time, or the group hangs:
//                    own device per rank               always
//                    threads of one process,           where blocks of all of them fit (one per SM) and every
//                      one device                      stream has a hardware queue of its own: else a launch
//                                                      waits behind a kernel that waits for it
//                    processes on one device           under MPS alone: without it their contexts take turns,
//                                                      and a kernel that waits for another process burns its
//                                                      whole time slice
// stream_ordered   Kernels never wait. Phases are ordered by stream memory operations (cuStreamWaitValue32,
//                  cuStreamWriteValue32), for which a context gives up its turn. Slower per operation, right
//                  for processes that share a device. See sync_words.h.
#pragma once

#include <string>
#include <vector>

#include "device/topology.h"

namespace pycomm::cuda {

enum class Requested { automatic, resident, stream_ordered };
enum class Protocol { resident, stream_ordered };
const char* to_string(Protocol protocol);

struct ProtocolChoice {
  Protocol protocol;
  int blocks;  // of a kernel, at most; equal on all ranks
  std::string reason;
};

inline constexpr int default_connections = 8;  // of the driver, where CUDA_DEVICE_MAX_CONNECTIONS is unset
inline constexpr int max_connections = 32;

// Pure: the verdict is the same on all ranks. Throws std::runtime_error with the way out where no protocol,
// or not the requested one, can work.
ProtocolChoice choose_protocol(const std::vector<Place>& places, int rank,
                               Requested requested = Requested::automatic);

}  // namespace pycomm::cuda
