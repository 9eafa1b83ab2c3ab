// mapping.h -- how the memory of every rank gets an address in this process: the ways of peer_memory.h, tried
// one after the other.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "../../communicator/communicator.h"
#include "departures.h"
#include "device_memory.h"
#include "handout.h"
#include "topology.h"

namespace pycomm::cuda {

enum class Access { own, same_process, cuda_ipc, vmm_fd };
const char* to_string(Access access);

// One block of every rank, as this rank has mapped them.
struct Mapping {
  Topology topology;
  size_t nbytes = 0;
  const pid_t pid = ::getpid();  // a forked child has no part in this
  std::shared_ptr<Departures> departures;
  Access way = Access::cuda_ipc;  // how other processes are reached
  bool exported_ipc = false;
  DeviceMemory own;
  std::vector<DeviceMemory> mapped;  // by rank; empty for ranks of this process
  std::vector<std::byte*> addresses;
  DeviceMemory multicast;
  std::string multicast_text = "not requested";

  ~Mapping() { release(); }
  void release();

 private:
  bool shared_with_threads() const;
};

struct Offer;  // what a rank tells the others of its block

// Each try_ is collective and returns the same on every rank: empty, or what went wrong where. After a
// failure nothing of it is left.
class MappingBuilder {
 public:
  MappingBuilder(Communicator& comm, Mapping& mapping);

  std::string try_ipc();
  std::string try_vmm(bool for_multicast);
  std::string try_multicast();

 private:
  void mark(Offer& offer);
  template <class Open>
  std::string map_peers(const std::vector<Offer>& offers, const Open& open);
  void check_token(int peer, uint64_t token);
  void reach_device_of(const Place& peer);
  std::string share_multicast();
  OwnedFd receive(const Offer& offer);

  Communicator& comm_;
  Mapping& mapping_;
  const int rank_;
  const Place& here_;
  int strangers_ = 0;  // ranks of other processes
  std::vector<Device> readers_;  // devices of the ranks of this process
  bool even_ = true;  // all blocks have one size
};

}  // namespace pycomm::cuda
