// budget.h -- who may spin on a device that ranks share.
//
// A block that waits for another rank keeps its multiprocessor. Blocks that find no room start when others
// end; so if those that have started wait for some that have not, nothing ends. Kernels of one operation are
// not all there is: a rank may have several groups, each with an operation under way in a stream of its own,
// and messages to several peers at once, in any order that its peers need not share.
//
//   device     | group 1: rank 0  rank 1  rank 2 | group 2: rank 0  rank 2 |  free  |
//   (one box   |   blocks each, for its one line of collectives            |        |
//   per multi-
//   processor)   messages, group 3 (no room left): in stream order, so that they keep nothing
//
// The rule: what spins has its place, what has no place does not spin.
//
//   - A group takes its blocks for all of its ranks when it is made, and gives them back when it is closed,
//     out of one count per device (of the process). It has one line of collectives (lines.h), which run one
//     after the other on every rank and never have more blocks than that.
//   - Where not enough is left, the group is made with Protocol::stream_ordered (protocol.h). Its kernels
//     never wait.
//   - Messages have a line for each peer and direction, too many for places. On a shared device they go in
//     stream order in every group, whatever protocol its collectives have.
//
// Why this cannot lock up. Whatever spins has started or has its place free. Take a collective that has not
// ended. Either all its ranks have come to it: then all its blocks run, and it ends, whatever else happens.
// Or one has not: then the place of that rank in this group is free, apart from kernels that end by
// themselves, and what the rank must do before, which does not spin or has a place of its own, can run there.
// So nothing waits for room in a circle; what is left is what the program itself makes wait (two ranks that
// use two groups in different orders, all in one stream). No operation waits for another of its rank on
// account of room: that would make programs hang that are right, a receive and a send at once, or two groups
// in two streams and different orders.
//
// Which alternative lost. One line at a time by events: hangs as just said. A pool that operations take their
// blocks from when all ranks have come: a kernel more for each operation, a lock on the device, and room that
// is lost when a rank dies. Fixed parts for each group: nobody knows how many will come, and one alone, the
// usual case, would have a part of the speed.
//
// What can go wrong. The first group takes all there is, so those after it are slower: close what is not
// used. Processes that share a device under MPS each count for themselves; a process assumes the part of the
// device that its ranks have in the most crowded group it has seen, so make the group of all ranks first.
// Kernels of others (NCCL) are in no count; a fused product has at most the blocks of its group, whose line
// it stands in (CudaGroup::enter_line). Ranks with a device each are not counted: a group has its 64 blocks
// there, and what its messages may have with them; several groups, used in orders that differ between ranks,
// could still exceed a device.
//
// [Note: hardware queues] The driver deals the streams of a process out to the hardware queues of the device:
// 8, or CUDA_DEVICE_MAX_CONNECTIONS, 32 at most. What is behind something that waits in one queue does not
// start, though it be in another stream. So streams that wait for each other by way of peers must not share a
// queue: the stream of each rank's caller, those that lines have of their own for asynchronous operations (up
// to two for each peer, one for collectives), of all ranks that are threads of the process. They are counted,
// and an operation that would need one more than there are queues is refused. A rank alone on its device may
// have its collectives in the queue of anything else: they come in one order on all ranks; only its messages
// count. Not counted: other streams of the program (torch's pool), which may share a queue with these. `make
// gpu-check` prints which streams do.
#pragma once

#include <memory>

#include "device/topology.h"
#include "kernels/layout.h"

namespace pycomm::cuda {

// Registers of a thread, at most (tests/test_nvcc.py compares them with what nvcc says). With more than 64, a
// multiprocessor holds one block of max_threads; so a place is a multiprocessor.
constexpr int registers_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::open:
    case Kernel::close: return 64;
    case Kernel::ring:
    case Kernel::multimem: return 96;
    default: return 128;
  }
}

// Fewer blocks than this are slower than stream order, but for the smallest operations.
inline constexpr int least_places = 4;

// The places of one rank of a group. Thread-safe.
class Places {
 public:
  // At most `wanted`, of what is left.
  Places(const Place& here, int ranks_here, int ranks_on_device, int wanted);
  ~Places() { keep(0); }
  Places(const Places&) = delete;

  int count() const { return count_; }
  void keep(int count);  // gives back the others
  // The device does not stop: they stay taken.
  void keep_for_ever() { count_ = 0; }

 private:
  const Uuid device_;
  int count_ = 0;
};

inline constexpr int default_connections = 8;  // of the driver, where CUDA_DEVICE_MAX_CONNECTIONS is unset
inline constexpr int max_connections = 32;
// Of the process on that device.
int queues_of(const Place& place);

// The streams that the lines of one rank of a group have of their own. Thread-safe.
class LineStreams {
 public:
  // Counts one more. False: that is one more than there are queues, and was not counted.
  bool take(const Place& here, int ranks_here, bool of_messages);
  void give_back();  // all of them
  ~LineStreams() { give_back(); }
  void keep_for_ever() { count_ = 0; }

 private:
  Uuid device_{};
  int count_ = 0;
};

}  // namespace pycomm::cuda
