// mapping.cc -- see mapping.h.
#include "mapping.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "../../communicator/agree.h"

namespace pycomm::cuda {

const char* to_string(Access access) {
  constexpr const char* names[] = {"own", "same_process", "cuda_ipc", "vmm_fd"};
  return names[static_cast<int>(access)];
}

void Mapping::release() {
  multicast.release();
  mapped.clear();
  if (departures && pid == ::getpid()) {
    departures->depart();
    // Kernels of other ranks may still write flags here after this rank's have ended. (What VMM exports lives
    // as long as it is mapped.)
    if ((exported_ipc || shared_with_threads()) && !departures->complete(topology))
      park(std::move(own), departures, topology);
  }
  own.release();
}

bool Mapping::shared_with_threads() const {
  for (size_t p = 0; p < topology.places.size(); ++p)
    if (static_cast<int>(p) != topology.rank && topology.places[p].same_process(topology.here())) return true;
  return false;
}

// --- building

// Exchanged as bytes.
struct Offer {
  Verdict verdict;
  uint64_t address = 0;
  uint64_t nbytes = 0;
  uint64_t token = 0;  // the first word of the block, while mappings are checked
  IpcHandle ipc = {};
  char socket[64] = {};  // of a Handout
};

namespace {

void set_name(char (&to)[64], const std::string& name) { std::strncpy(to, name.c_str(), sizeof(to) - 1); }

std::vector<Verdict> verdicts_of(const std::vector<Offer>& offers) {
  std::vector<Verdict> verdicts;
  for (const Offer& offer : offers) verdicts.push_back(offer.verdict);
  return verdicts;
}

}  // namespace

MappingBuilder::MappingBuilder(Communicator& comm, Mapping& mapping)
    : comm_(comm), mapping_(mapping), rank_(comm.rank()), here_(mapping.topology.here()) {
  for (const Place& place : mapping.topology.places) {
    if (!place.same_process(here_)) ++strangers_;
    else if (std::find(readers_.begin(), readers_.end(), place.device) == readers_.end())
      readers_.push_back(place.device);
  }
}

OwnedFd MappingBuilder::receive(const Offer& offer) {
  const double seconds = std::min(comm_.transport().timeout(), 1e6);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
  std::vector<OwnedFd> fds;
  if (const OwnedFd socket = connect_to(offer.socket, deadline)) fds = receive_fds(socket.get(), deadline);
  if (fds.empty()) throw std::runtime_error("the peer ended before it handed over its memory");
  return std::move(fds[0]);
}

// Own memory is there: zeroed but for a word by which peers know it.
void MappingBuilder::mark(Offer& offer) {
  static std::atomic<uint64_t> count{0};
  offer.address = mapping_.own.address();
  offer.nbytes = mapping_.own.nbytes();
  offer.token = here_.process ^ (count.fetch_add(1) + 1) << 16 ^ static_cast<uint64_t>(rank_);
  auto* const data = reinterpret_cast<std::byte*>(offer.address);
  zero_now(here_.device, data, offer.nbytes);
  copy_now(here_.device, data, &offer.token, sizeof(offer.token));
}

void MappingBuilder::check_token(int peer, uint64_t token) {
  uint64_t seen = 0;
  copy_now(here_.device, &seen, mapping_.addresses[peer], sizeof(seen));
  if (seen != token)
    throw std::runtime_error("the mapping of rank " + std::to_string(peer) +
                             " shows other memory than that of the rank");
}

// For plain pointers: VMM memory says itself which devices may address it.
void MappingBuilder::reach_device_of(const Place& peer) {
  if (peer.device == here_.device || mapping_.way == Access::vmm_fd) return;
  const Driver& table = require_driver();
  int can = 0;
  PYCOMM_CUDA_CHECK(table, cuDeviceCanAccessPeer, &can, here_.device, peer.device);
  if (!can)
    throw std::runtime_error("device " + std::to_string(here_.device) +
                             " cannot address the memory of device " + std::to_string(peer.device) +
                             " (no peer access)");
  ContextGuard guard(here_.device);
  const int result = table.cuCtxEnablePeerAccess(primary_context(peer.device), 0);
  if (result != result::peer_access_already_enabled) check(result, "cuCtxEnablePeerAccess");
}

// open(peer) gives the mapping of another process's block.
template <class Open>
std::string MappingBuilder::map_peers(const std::vector<Offer>& offers, const Open& open) {
  const int world_size = comm_.world_size();
  const Verdict verdict = attempt([&] {
    mapping_.mapped.resize(world_size);
    mapping_.addresses.resize(world_size);
    for (int p = 0; p < world_size; ++p) {
      const Place& place = mapping_.topology.places[p];
      if (place.same_process(here_)) reach_device_of(place);
      else mapping_.mapped[p] = open(p);
      const DevicePtr address = mapping_.mapped[p] ? mapping_.mapped[p].address() : offers[p].address;
      mapping_.addresses[p] = reinterpret_cast<std::byte*>(address);
      check_token(p, offers[p].token);
    }
  });
  const std::string failure = first_failure(all_gather_value(comm_, verdict));
  if (failure.empty()) return "";
  mapping_.mapped.clear();
  all_gather_value(comm_, rank_);  // every rank has unmapped the others, who may now free their memory
  mapping_.own.release();
  mapping_.exported_ipc = false;
  return failure;
}

std::string MappingBuilder::try_ipc() {
  mapping_.way = Access::cuda_ipc;
  Offer mine;
  mine.verdict = attempt([&] {
    mapping_.own = DeviceMemory::allocate(here_.device, mapping_.nbytes);
    mark(mine);
    if (strangers_) mine.ipc = mapping_.own.ipc_handle();
    mapping_.exported_ipc = strangers_ > 0;
  });
  const std::vector<Offer> offers = all_gather_value(comm_, mine);
  if (std::string failure = first_failure(verdicts_of(offers)); !failure.empty()) {
    mapping_.own.release();
    mapping_.exported_ipc = false;
    return failure;
  }
  return map_peers(offers, [&](int peer) { return DeviceMemory::open(here_.device, offers[peer].ipc); });
}

std::string MappingBuilder::try_vmm(bool for_multicast) {
  mapping_.way = Access::vmm_fd;
  Offer mine;
  std::unique_ptr<Handout> handout;
  mine.verdict = attempt([&] {
    if (!here_.posix_fd_handles)
      throw std::runtime_error("the device does not export memory as a file descriptor");
    const size_t multiple = for_multicast ? multicast_granularity(mapping_.nbytes, comm_.world_size()) : 0;
    mapping_.own = DeviceMemory::create(here_.device, mapping_.nbytes, multiple, readers_);
    mark(mine);
    if (strangers_) handout = std::make_unique<Handout>(mapping_.own.export_fd(), strangers_);
    if (handout) set_name(mine.socket, handout->name());
  });
  const std::vector<Offer> offers = all_gather_value(comm_, mine);
  if (std::string failure = first_failure(verdicts_of(offers)); !failure.empty()) {
    mapping_.own.release();
    return failure;
  }
  for (const Offer& offer : offers) even_ &= offer.nbytes == mine.nbytes;
  return map_peers(offers, [&](int peer) {
    const OwnedFd fd = receive(offers[peer]);
    return DeviceMemory::import(here_.device, fd.get(), offers[peer].nbytes);
  });
}

std::string MappingBuilder::try_multicast() {
  std::string failure = even_ ? share_multicast() : "the devices differ in granularity";
  if (!failure.empty()) mapping_.multicast.release();
  return failure;
}

// Binding and mapping would block in the driver until every device has been added, so each step waits for the
// verdicts of the one before.
std::string MappingBuilder::share_multicast() {
  Offer mine;
  std::unique_ptr<Handout> handout;
  mine.verdict = attempt([&] {
    if (rank_ != 0) return;
    mapping_.multicast =
        DeviceMemory::create_multicast(here_.device, mapping_.own.nbytes(), comm_.world_size());
    handout = std::make_unique<Handout>(mapping_.multicast.export_fd(), comm_.world_size() - 1);
    set_name(mine.socket, handout->name());
  });
  const std::vector<Offer> offers = all_gather_value(comm_, mine);
  std::string failure = first_failure(verdicts_of(offers));
  const auto step = [&](const auto& body) {
    if (failure.empty()) failure = first_failure(all_gather_value(comm_, attempt(body)));
  };
  step([&] {
    if (rank_ != 0)
      mapping_.multicast =
          DeviceMemory::import_multicast(here_.device, receive(offers[0]).get(), mapping_.own.nbytes());
    mapping_.multicast.add_device();
  });
  step([&] {
    mapping_.multicast.bind(mapping_.own);
    mapping_.multicast.map({here_.device});
  });
  return failure;
}

}  // namespace pycomm::cuda
