// peer_memory.cc -- see peer_memory.h.
#include "peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "../collectives/agree.h"
#include "../collectives/registered.h"
#include "../memory/fd_channel.h"
#include "device_memory.h"

namespace pycomm::cuda {

namespace {

// --- when exported memory may be freed: [Note: end of exported memory] in peer_memory.h ---

// One word per rank in shared memory: not 0 once the rank has unmapped its peers for good. A rank that died has lost its record lock on
// the segment ([Note: liveness by record locks] in memory/segment.h).
class Departures {
 public:
  explicit Departures(Communicator& comm) : rank_(comm.rank()) {
    const RegisteredBuffer buffer = allocate_registered(comm, sizeof(uint32_t));
    comm.transport().drop_region(buffer.region);  // it is no buffer of collectives; the segment stays mapped
    segment_ = buffer.segment;
    stride_ = buffer.stride;
    agree(comm, attempt([&] { segment_->hold_lock(rank_); }));  // no rank asks before all hold theirs
  }

  void depart() { word(rank_).store(1, std::memory_order_release); }
  // `by_death`: the end of its process counts, too. Ranks of this process have locks that it cannot ask about.
  bool departed(int rank, bool by_death) const {
    return word(rank).load(std::memory_order_acquire) || (by_death && !segment_->lock_held(rank));
  }

 private:
  std::atomic_ref<uint32_t> word(int rank) const {
    return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(segment_->data() + rank * stride_));
  }

  int rank_;
  size_t stride_;
  std::shared_ptr<Segment> segment_;
};

bool all_departed(const Departures& departures, const Topology& topology) {
  for (size_t p = 0; p < topology.places.size(); ++p)
    if (static_cast<int>(p) != topology.rank &&
        !departures.departed(static_cast<int>(p), !topology.places[p].same_process(topology.here())))
      return false;
  return true;
}

struct Parked {
  DeviceMemory memory;
  std::shared_ptr<Departures> departures;
  Topology topology;
};

std::mutex parked_mutex;
std::vector<Parked>& parked_blocks() {
  static auto* blocks = new std::vector<Parked>;  // never destroyed: the driver may be gone before static objects are
  return *blocks;
}

void park(DeviceMemory memory, std::shared_ptr<Departures> departures, const Topology& topology) {
  std::lock_guard lock(parked_mutex);
  parked_blocks().push_back({std::move(memory), std::move(departures), topology});
}

// --- handing a file descriptor to other ranks ---

struct OwnedFd {
  int fd;
  ~OwnedFd() { ::close(fd); }
};

// Serves fd to `receivers` peers in a thread, until all came or this object ends. It must live until the ranks have exchanged whether they
// received it.
class Handout {
 public:
  Handout(int fd, int receivers) : fd_{fd} {
    if (receivers > 0) thread_ = std::thread([this, receivers] { serve(receivers); });
  }
  ~Handout() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
  }
  Handout(const Handout&) = delete;
  const std::string& name() const { return server_.name(); }

 private:
  void serve(int receivers) {
    constexpr auto tick = std::chrono::milliseconds(20);
    while (receivers > 0 && !stop_.load()) receivers -= server_.serve(fd_.fd, receivers, std::chrono::steady_clock::now() + tick);
  }

  OwnedFd fd_;
  FdServer server_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// What a rank tells the others of its block. Exchanged as bytes.
struct Offer {
  Verdict verdict;
  uint64_t address = 0;
  uint64_t nbytes = 0;
  uint64_t token = 0;     // the first word of the block, while mappings are checked
  IpcHandle ipc = {};
  char socket[64] = {};   // of a Handout
};

void set_name(char (&to)[64], const std::string& name) { std::strncpy(to, name.c_str(), sizeof(to) - 1); }

std::vector<Verdict> verdicts_of(const std::vector<Offer>& offers) {
  std::vector<Verdict> verdicts;
  for (const Offer& offer : offers) verdicts.push_back(offer.verdict);
  return verdicts;
}

}  // namespace

const char* to_string(Access access) {
  constexpr const char* names[] = {"own", "same_process", "cuda_ipc", "vmm_fd"};
  return names[static_cast<int>(access)];
}

struct PeerMemory::State {
  Topology topology;
  size_t nbytes = 0;
  const pid_t pid = ::getpid();       // a forked child has no part in this
  std::shared_ptr<Departures> departures;
  Access way = Access::cuda_ipc;      // how other processes are reached
  bool exported_ipc = false;
  DeviceMemory own;
  std::vector<DeviceMemory> mapped;   // by rank; empty for ranks of this process
  std::vector<std::byte*> addresses;
  DeviceMemory multicast;
  std::string multicast_text = "not requested";

  ~State() { release(); }
  void release();
  bool shared_with_threads() const {
    for (size_t p = 0; p < topology.places.size(); ++p)
      if (static_cast<int>(p) != topology.rank && topology.places[p].same_process(topology.here())) return true;
    return false;
  }
};

void PeerMemory::State::release() {
  multicast.release();
  mapped.clear();
  if (departures && pid == ::getpid()) {
    departures->depart();
    // Kernels of other ranks may still write flags here after this rank's have ended. (What VMM exports lives as long as it is mapped.)
    if ((exported_ipc || shared_with_threads()) && !all_departed(*departures, topology)) park(std::move(own), departures, topology);
  }
  own.release();
}

// --- creation -------------------------------------------------------------------------------------------------------------------

// Each try_ is collective and returns the same on every rank: empty, or what went wrong where. After a failure nothing of it is left.
class PeerMemory::Builder {
 public:
  Builder(Communicator& comm, State& state) : comm_(comm), state_(state), rank_(comm.rank()), here_(state.topology.here()) {
    for (const Place& place : state.topology.places) {
      if (!place.same_process(here_)) ++strangers_;
      else if (std::find(readers_.begin(), readers_.end(), place.device) == readers_.end()) readers_.push_back(place.device);
    }
  }

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
  OwnedFd receive(const Offer& offer) {
    const double seconds = std::min(comm_.transport().timeout(), 1e6);
    return {receive_fd(offer.socket, std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)))};
  }

  Communicator& comm_;
  State& state_;
  const int rank_;
  const Place& here_;
  int strangers_ = 0;            // ranks of other processes
  std::vector<Device> readers_;  // devices of the ranks of this process
  bool even_ = true;             // all blocks have one size
};

// Own memory is there: zeroed but for a word by which peers know it.
void PeerMemory::Builder::mark(Offer& offer) {
  static std::atomic<uint64_t> count{0};
  offer.address = state_.own.address();
  offer.nbytes = state_.own.nbytes();
  offer.token = here_.process ^ (count.fetch_add(1) + 1) << 16 ^ static_cast<uint64_t>(rank_);
  auto* const data = reinterpret_cast<std::byte*>(offer.address);
  zero_now(here_.device, data, offer.nbytes);
  copy_now(here_.device, data, &offer.token, sizeof(offer.token));
}

void PeerMemory::Builder::check_token(int peer, uint64_t token) {
  uint64_t seen = 0;
  copy_now(here_.device, &seen, state_.addresses[peer], sizeof(seen));
  if (seen != token) throw std::runtime_error("the mapping of rank " + std::to_string(peer) + " shows other memory than that of the rank");
}

// For plain pointers: VMM memory says itself which devices may address it.
void PeerMemory::Builder::reach_device_of(const Place& peer) {
  if (peer.device == here_.device || state_.way == Access::vmm_fd) return;
  const Driver& table = require_driver();
  int can = 0;
  PYCOMM_CUDA_CHECK(table, cuDeviceCanAccessPeer, &can, here_.device, peer.device);
  if (!can)
    throw std::runtime_error("device " + std::to_string(here_.device) + " cannot address the memory of device " +
                             std::to_string(peer.device) + " (no peer access)");
  ContextGuard guard(here_.device);
  const int result = table.cuCtxEnablePeerAccess(primary_context(peer.device), 0);
  if (result != result::peer_access_already_enabled) check(result, "cuCtxEnablePeerAccess");
}

// open(peer) gives the mapping of another process's block.
template <class Open>
std::string PeerMemory::Builder::map_peers(const std::vector<Offer>& offers, const Open& open) {
  const int world_size = comm_.world_size();
  const Verdict verdict = attempt([&] {
    state_.mapped.resize(world_size);
    state_.addresses.resize(world_size);
    for (int p = 0; p < world_size; ++p) {
      const Place& place = state_.topology.places[p];
      if (place.same_process(here_)) reach_device_of(place);
      else state_.mapped[p] = open(p);
      const DevicePtr address = state_.mapped[p] ? state_.mapped[p].address() : offers[p].address;
      state_.addresses[p] = reinterpret_cast<std::byte*>(address);
      check_token(p, offers[p].token);
    }
  });
  const std::string failure = first_failure(all_gather_value(comm_, verdict));
  if (failure.empty()) return "";
  state_.mapped.clear();
  all_gather_value(comm_, rank_);  // every rank has unmapped the others, who may now free their memory
  state_.own.release();
  state_.exported_ipc = false;
  return failure;
}

std::string PeerMemory::Builder::try_ipc() {
  state_.way = Access::cuda_ipc;
  Offer mine;
  mine.verdict = attempt([&] {
    state_.own = DeviceMemory::allocate(here_.device, state_.nbytes);
    mark(mine);
    if (strangers_) mine.ipc = state_.own.ipc_handle();
    state_.exported_ipc = strangers_ > 0;
  });
  const std::vector<Offer> offers = all_gather_value(comm_, mine);
  if (std::string failure = first_failure(verdicts_of(offers)); !failure.empty()) {
    state_.own.release();
    state_.exported_ipc = false;
    return failure;
  }
  return map_peers(offers, [&](int peer) { return DeviceMemory::open(here_.device, offers[peer].ipc); });
}

std::string PeerMemory::Builder::try_vmm(bool for_multicast) {
  state_.way = Access::vmm_fd;
  Offer mine;
  std::unique_ptr<Handout> handout;
  mine.verdict = attempt([&] {
    if (!here_.posix_fd_handles) throw std::runtime_error("the device does not export memory as a file descriptor");
    const size_t multiple = for_multicast ? multicast_granularity(state_.nbytes, comm_.world_size()) : 0;
    state_.own = DeviceMemory::create(here_.device, state_.nbytes, multiple, readers_);
    mark(mine);
    if (strangers_) handout = std::make_unique<Handout>(state_.own.export_fd(), strangers_);
    if (handout) set_name(mine.socket, handout->name());
  });
  const std::vector<Offer> offers = all_gather_value(comm_, mine);
  if (std::string failure = first_failure(verdicts_of(offers)); !failure.empty()) {
    state_.own.release();
    return failure;
  }
  for (const Offer& offer : offers) even_ &= offer.nbytes == mine.nbytes;
  return map_peers(offers, [&](int peer) {
    const OwnedFd fd = receive(offers[peer]);
    return DeviceMemory::import(here_.device, fd.fd, offers[peer].nbytes);
  });
}

std::string PeerMemory::Builder::try_multicast() {
  std::string failure = even_ ? share_multicast() : "the devices differ in granularity";
  if (!failure.empty()) state_.multicast.release();
  return failure;
}

// Binding and mapping would block in the driver until every device has been added, so each step waits for the verdicts of the one before.
std::string PeerMemory::Builder::share_multicast() {
  Offer mine;
  std::unique_ptr<Handout> handout;
  mine.verdict = attempt([&] {
    if (rank_ != 0) return;
    state_.multicast = DeviceMemory::create_multicast(here_.device, state_.own.nbytes(), comm_.world_size());
    handout = std::make_unique<Handout>(state_.multicast.export_fd(), comm_.world_size() - 1);
    set_name(mine.socket, handout->name());
  });
  const std::vector<Offer> offers = all_gather_value(comm_, mine);
  std::string failure = first_failure(verdicts_of(offers));
  const auto step = [&](const auto& body) {
    if (failure.empty()) failure = first_failure(all_gather_value(comm_, attempt(body)));
  };
  step([&] {
    if (rank_ != 0) state_.multicast = DeviceMemory::import_multicast(here_.device, receive(offers[0]).fd, state_.own.nbytes());
    state_.multicast.add_device();
  });
  step([&] {
    state_.multicast.bind(state_.own);
    state_.multicast.map({here_.device});
  });
  return failure;
}

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
                           std::string(what) + "=" + std::to_string(mine) + " here, " + std::to_string(other) + " on rank " +
                               std::to_string(p) + ". All ranks must pass equal values.");
  };
  for (size_t p = 0; p < all.size(); ++p) {
    if (all[p].nbytes != nbytes) raise(p, "nbytes", nbytes, all[p].nbytes);
    if (all[p].multicast != multicast) raise(p, "multicast", multicast, all[p].multicast);
  }
}

}  // namespace

PeerMemory::PeerMemory() : state_(std::make_unique<State>()) {}

PeerMemory::~PeerMemory() {
  state_.reset();
  free_parked();
}

std::unique_ptr<PeerMemory> PeerMemory::create(Communicator& comm, const Topology& topology, size_t nbytes, bool multicast) {
  free_parked();
  check_equal_calls(comm, nbytes, multicast);
  std::unique_ptr<PeerMemory> memory(new PeerMemory);
  State& state = *memory->state_;
  state.topology = topology;
  state.nbytes = nbytes;
  state.departures = std::make_shared<Departures>(comm);
  if (multicast) state.multicast_text = no_multicast(topology);

  Builder builder(comm, state);
  const bool for_multicast = multicast && state.multicast_text.empty();
  const auto try_way = [&](Access way) { return way == Access::cuda_ipc ? builder.try_ipc() : builder.try_vmm(for_multicast); };
  const Access first = for_multicast ? Access::vmm_fd : Access::cuda_ipc, second = for_multicast ? Access::cuda_ipc : Access::vmm_fd;
  if (const std::string failure = try_way(first); !failure.empty()) {
    if (for_multicast) state.multicast_text = failure;
    if (const std::string failure_too = try_way(second); !failure_too.empty())
      comm.transport().raise(ErrorKind::none, {OpKind::alloc, 0}, -1,
                             "no way to share device memory works for all ranks. " + std::string(to_string(first)) + ": " + failure + ". " +
                                 to_string(second) + ": " + failure_too + ".");
  }
  if (for_multicast && state.way == Access::vmm_fd) state.multicast_text = builder.try_multicast();
  // The words that marked the blocks go; no rank may use the memory before that, nor a multicast address before all have mapped it.
  agree(comm, attempt([&] { zero_now(topology.here().device, memory->address(comm.rank()), sizeof(uint64_t)); }));
  return memory;
}

int PeerMemory::free_parked() {
  std::lock_guard lock(parked_mutex);
  auto& blocks = parked_blocks();
  std::erase_if(blocks,
                [](const Parked& each) { return !each.memory.from_this_process() || all_departed(*each.departures, each.topology); });
  return static_cast<int>(blocks.size());
}

// --- what it is -----------------------------------------------------------------------------------------------------------------

size_t PeerMemory::nbytes() const { return state_->nbytes; }
std::byte* PeerMemory::address(int rank) const { return state_->addresses[rank]; }
std::byte* PeerMemory::multicast() const { return reinterpret_cast<std::byte*>(state_->multicast.address()); }

Access PeerMemory::access(int rank) const {
  if (rank == state_->topology.rank) return Access::own;
  return state_->topology.places[rank].same_process(state_->topology.here()) ? Access::same_process : state_->way;
}

std::string PeerMemory::describe() const {
  std::string text;
  for (Access kind : {Access::own, Access::same_process, Access::cuda_ipc, Access::vmm_fd}) {
    std::string ranks;
    for (int p = 0; p < static_cast<int>(state_->topology.places.size()); ++p)
      if (access(p) == kind) ranks += (ranks.empty() ? "" : ", ") + std::to_string(p);
    if (!ranks.empty()) text += std::string(to_string(kind)) + ": rank " + ranks + "; ";
  }
  return text + (state_->multicast_text.empty() ? "multicast" : "no multicast (" + state_->multicast_text + ")");
}

}  // namespace pycomm::cuda
