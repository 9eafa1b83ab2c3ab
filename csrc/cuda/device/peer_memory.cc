// peer_memory.cc -- see peer_memory.h.
#include "peer_memory.h"

#include "../../communicator/agree.h"

namespace pycomm::cuda {

namespace {

// Why there can be no multicast address; empty: there can.
std::string no_multicast(const Topology& topology) {
  if (topology.places.size() < 2) return "one rank";
  if (!topology.own_devices()) return "ranks share a device";
  for (size_t p = 0; p < topology.places.size(); ++p)
    if (!topology.places[p].multicast || !topology.places[p].posix_fd_handles)
      return "the device of rank " + std::to_string(p) + " does not support it";
  return "";
}

void check_equal_calls(Communicator& comm, size_t nbytes, bool multicast) {
  struct Arguments {
    uint64_t nbytes, multicast;
  };
  const std::vector<Arguments> all = all_gather_value(comm, Arguments{nbytes, multicast});
  auto raise = [&](size_t p, const char* what, uint64_t mine, uint64_t other) {
    comm.transport().raise(ErrorKind::mismatch, {OpKind::alloc, 0}, static_cast<int>(p),
                           std::string(what) + "=" + std::to_string(mine) + " here, " +
                               std::to_string(other) + " on rank " + std::to_string(p) +
                               ". All ranks must pass equal values.");
  };
  for (size_t p = 0; p < all.size(); ++p) {
    if (all[p].nbytes != nbytes) raise(p, "nbytes", nbytes, all[p].nbytes);
    if (all[p].multicast != multicast) raise(p, "multicast", multicast, all[p].multicast);
  }
}

}  // namespace

PeerMemory::PeerMemory() : mapping_(std::make_unique<Mapping>()) {}

PeerMemory::~PeerMemory() {
  mapping_.reset();
  free_parked();
}

std::unique_ptr<PeerMemory> PeerMemory::create(Communicator& comm, const Topology& topology, size_t nbytes,
                                               bool multicast) {
  free_parked();
  check_equal_calls(comm, nbytes, multicast);
  std::unique_ptr<PeerMemory> memory(new PeerMemory);
  Mapping& mapping = *memory->mapping_;
  mapping.topology = topology;
  mapping.nbytes = nbytes;
  mapping.departures = std::make_shared<Departures>(comm);
  if (multicast) mapping.multicast_text = no_multicast(topology);

  MappingBuilder builder(comm, mapping);
  const bool for_multicast = multicast && mapping.multicast_text.empty();
  const auto try_way = [&](Access way) {
    return way == Access::cuda_ipc ? builder.try_ipc() : builder.try_vmm(for_multicast);
  };
  const Access first = for_multicast ? Access::vmm_fd : Access::cuda_ipc,
               second = for_multicast ? Access::cuda_ipc : Access::vmm_fd;
  if (const std::string failure = try_way(first); !failure.empty()) {
    if (for_multicast) mapping.multicast_text = failure;
    if (const std::string failure_too = try_way(second); !failure_too.empty())
      comm.transport().raise(ErrorKind::none, {OpKind::alloc, 0}, -1,
                             "no way to share device memory works for all ranks. " +
                                 std::string(to_string(first)) + ": " + failure + ". " + to_string(second) +
                                 ": " + failure_too + ".");
  }
  if (for_multicast && mapping.way == Access::vmm_fd) mapping.multicast_text = builder.try_multicast();
  // The words that marked the blocks go; no rank may use the memory before that, nor a multicast address
  // before all have mapped it.
  agree(comm,
        attempt([&] { zero_now(topology.here().device, memory->address(comm.rank()), sizeof(uint64_t)); }));
  return memory;
}

int PeerMemory::free_parked() { return cuda::free_parked(); }

// --- what it is

size_t PeerMemory::nbytes() const { return mapping_->nbytes; }
std::byte* PeerMemory::address(int rank) const { return mapping_->addresses[rank]; }
std::byte* PeerMemory::multicast() const {
  return reinterpret_cast<std::byte*>(mapping_->multicast.address());
}

Access PeerMemory::access(int rank) const {
  if (rank == mapping_->topology.rank) return Access::own;
  return mapping_->topology.places[rank].same_process(mapping_->topology.here()) ? Access::same_process
                                                                                 : mapping_->way;
}

std::string PeerMemory::describe() const {
  std::string text;
  for (Access kind : {Access::own, Access::same_process, Access::cuda_ipc, Access::vmm_fd}) {
    std::string ranks;
    for (int p = 0; p < static_cast<int>(mapping_->topology.places.size()); ++p)
      if (access(p) == kind) ranks += (ranks.empty() ? "" : ", ") + std::to_string(p);
    if (!ranks.empty()) text += std::string(to_string(kind)) + ": rank " + ranks + "; ";
  }
  return text +
         (mapping_->multicast_text.empty() ? "multicast" : "no multicast (" + mapping_->multicast_text + ")");
}

}  // namespace pycomm::cuda
