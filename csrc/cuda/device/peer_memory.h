// peer_memory.h -- device memory of every rank that every rank of the group can address.
//
//   rank           its process          how it is addressed from here
//   own            this one             cuMemAlloc, or cuMemCreate and a mapping
//   same_process   another thread       the same pointer (and peer access between two devices)
//   cuda_ipc       another process      cuIpcGetMemHandle, cuIpcOpenMemHandle of a cuMemAlloc block
//   vmm_fd         another process      cuMemCreate, exported as a file descriptor over a UNIX socket
//
// Legacy IPC is tried first, VMM where it fails (containers without a common pid namespace, MIG, pools):
// every rank allocates, exports, maps all peers and reads a token through each mapping; only what works for
// all ranks is used. Each step ends with an exchange of verdicts, so a failure on one rank is an error that
// names it on all ranks, never a wait.
//
// [Note: end of exported memory] Freeing memory that another process still has mapped by IPC is undefined
// behaviour (cuda.h, at cuIpcGetMemHandle). The end of a PeerMemory is not collective, though: ranks go in
// any order, or die. Each rank therefore notes in a little shared memory when it has unmapped its peers. Own
// memory is freed once every peer has done so or is dead; until then it is parked, and looked at again by
// each create() and destructor of this process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../../communicator/communicator.h"
#include "mapping.h"

namespace pycomm::cuda {

class PeerMemory {
 public:
  // Collective: every rank passes the same nbytes and multicast. The memory is zeroed, aligned to 2 MiB, and
  // ready on every rank when create() returns. Throws on every rank if any rank fails. `multicast`: also at
  // one address that reaches all ranks, where every rank has a device of its own that supports it.
  static std::unique_ptr<PeerMemory> create(Communicator& comm, const Topology& topology, size_t nbytes,
                                            bool multicast = false);
  // Not collective. Kernels of this rank that use the memory must have ended, and peers must not use this
  // rank's memory any more.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;

  size_t nbytes() const;
  std::byte* address(int rank) const;  // of rank's memory, in this process
  std::byte* multicast() const;        // nullptr: not requested or not available
  Access access(int rank) const;
  std::string describe() const;        // "own: rank 0; cuda_ipc: rank 1, 2; no multicast (not requested)"

  // Frees parked blocks whose peers have unmapped them by now. Returns how many are left in this process.
  static int free_parked();

 private:
  PeerMemory();
  std::unique_ptr<Mapping> mapping_;
};

}  // namespace pycomm::cuda
