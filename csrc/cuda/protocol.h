// protocol.h -- how the ranks of a group wait for each other on the device: one of two protocols, chosen by
// where the ranks sit.
//
// resident         One kernel per operation; its blocks spin on flags that the kernels of the other ranks
//                  write. All blocks of all ranks must therefore run at the same time, or the group hangs:
//                    own device per rank               always
//                    threads of one process,           where blocks of all of them, and of all groups, fit
//                      one device                      (budget.h) and every stream has a hardware queue of
//                                                      its own: else a launch waits behind a kernel that
//                                                      waits for it
//                    processes on one device           under MPS alone: without it their contexts take turns,
//                                                      and a kernel that waits for another process burns its
//                                                      whole time slice
// stream_ordered   Kernels never wait. Phases are ordered by stream memory operations (cuStreamBatchMemOp: an
//                  exchange with all ranks is one call), for which a context gives up its turn. Slower per
//                  operation, right for processes that share a device. See sync_words.h.
#pragma once

#include <string>
#include <vector>

#include "device/topology.h"
#include "kernels/layout.h"

namespace pycomm::cuda {

enum class Requested { automatic, resident, stream_ordered };
enum class Protocol { resident, stream_ordered };
const char* to_string(Protocol protocol);

struct ProtocolChoice {
  Protocol protocol;
  int blocks;  // of a kernel, at most; equal on all ranks
  int message_blocks;  // of a send or recv, likewise
  bool messages_in_order;  // they are ordered by stream memory operations in any case (budget.h)
  std::string reason;
};

// Pure: the verdict is the same on all ranks. Throws std::runtime_error with the way out where no protocol,
// or not the requested one, can work. `room`: blocks that other groups have left for each rank of this one.
ProtocolChoice choose_protocol(const std::vector<Place>& places, int rank,
                               Requested requested = Requested::automatic, int room = max_blocks);

}  // namespace pycomm::cuda
