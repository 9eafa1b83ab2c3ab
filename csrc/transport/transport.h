// transport.h -- one rank's view of a group on one node.
//
// It knows ranks, bytes and flags, and nothing about collectives or element types. Its parts, from below:
//   group_memory   what lies where in the memory that all ranks share (layout.h)
//   health         who is alive, and why a group is broken
//   wait           the one place where a rank waits, and how others wake it
//   regions        registered memory, mapped by every rank
//   rendezvous     how the ranks of a group find each other, with record (what they tell each other)
//   join           how a group is made of them (Joining)
//   survivors      how a group is made of those that live, when it has lost ranks; page_store: their store
// Transport holds them and adds the reach into peers' memory.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "../store/store.h"
#include "group_memory.h"
#include "hand_off.h"
#include "health.h"
#include "regions.h"
#include "status_page.h"
#include "wait.h"

namespace pycomm {

// For groups that come to move device memory, too; the transport only keeps them (cuda/group.h).
struct DeviceOptions {
  size_t staging_bytes = 0;  // per rank, in device memory; 0: 16 MiB
  std::string protocol;  // "", "resident" or "stream_ordered"
  int connections = 0;  // CUDA_DEVICE_MAX_CONNECTIONS; 0: unset
};

// Three years, in seconds: a time limit that can be added to any clock. What is given from outside and is
// not above 0, or longer, is refused or cut where it comes in.
inline constexpr double longest_timeout = 1e8;

struct TransportOptions {
  std::string name;  // of the group: separates keys in the store, shown in errors
  double timeout = 300.0;  // seconds up to longest_timeout, for the rendezvous and as default for operations
  size_t staging_bytes = 0;  // 0: 8 MiB for the first group of the processes, 1 MiB for each further one
  std::string host_id;  // overrides the identity of the host
  bool use_cma = true;  // read peers' memory by process_vm_readv where the kernel allows it
  int threads = 1;  // worker threads per rank (lanes)
  // Called on rank 0 as it makes the group's memory, with the group's ranks and cores: fills the note, zeros
  // till then, that every rank finds at Transport::note().
  std::function<void(int, int, std::byte*)> write_note;
  DeviceOptions device;
  double host_timeout = 10;  // seconds after which a host of the group that is silent is lost
  Whole whole;  // of which the group is a part
  std::string place;  // of that part, in the keys of the store
};

class Transport {
 public:
  // What all ranks of a group have settled when they met (join.cc).
  struct Terms {
    int lanes = 1;
    int cores = 1;  // that the ranks of the group may run on, together
    bool one_cache = true;  // they share their last level cache, as far as is known
    size_t budget = 0;
    bool primary = false;  // the first group of each process
  };

  Transport(Identity identity, const TransportOptions& options, const Terms& terms,
            std::unique_ptr<SharedMemory> memory, Lives lives);
  ~Transport();
  Transport(const Transport&) = delete;
  void meet(const WaitScope& scope);  // all ranks, in the shared memory; before anything else

  int rank() const { return identity_.rank; }
  int world_size() const { return identity_.world_size; }
  const std::string& name() const { return identity_.group; }
  int lanes() const { return terms_.lanes; }
  int cores() const { return terms_.cores; }
  // How fast lines pass between the ranks' cores, and whether it is worth measuring: only where the ranks may
  // copy through the kernel or not.
  HandOff& hand_off() { return hand_off_; }
  const HandOff& hand_off() const { return hand_off_; }
  bool measures_hand_off() const { return reach_ == Reach::kernel && world_size() > 1 && !oversubscribed(); }
  bool oversubscribed() const { return waiting_.oversubscribed(); }
  size_t staging_bytes() const { return memory_.staging_bytes(); }
  size_t ring_bytes() const { return memory_.ring_bytes(); }
  size_t budget_bytes() const { return terms_.budget; }
  double timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(double seconds) { timeout_.store(seconds, std::memory_order_relaxed); }
  const TransportOptions& options() const { return options_; }
  const DeviceOptions& device_options() const { return options_.device; }
  std::string where(const OpInfo& op) const { return identity_.where(op); }  // "[rank 2/4] all_reduce #17: "
  std::string name(int peer) const { return identity_.name(peer); }  // "rank 3"
  int number(int peer) const { return identity_.number(peer); }  // as users know it
  const Whole& whole() const { return identity_.whole; }

  // --- status (status_page.h) ---
  // The operation that begins and ends here, as users count it.
  void note_operation(const OpInfo& op) {
    if (status_)
      status_->operation.store(op.sequence << 8 | static_cast<uint64_t>(op.kind), std::memory_order_relaxed);
  }
  void note_completed(const OpInfo& op) {
    if (!status_) return;
    status_->completed.store(op.sequence, std::memory_order_relaxed);
    status_->operation.store(0, std::memory_order_relaxed);
  }

  // --- shared memory (group_memory.h) ---
  const std::byte* note() const { return memory_.header().note; }
  RankControl& control(int rank) const { return memory_.control(rank); }
  StorePage& page(int rank) const { return memory_.page(rank); }
  std::atomic<uint64_t>& survivors() const { return memory_.header().survivors; }
  OpSlot& slot(int rank, uint64_t sequence) const { return memory_.slot(rank, sequence); }
  PartRef* parts(int rank, uint64_t sequence, bool output) const {
    return memory_.parts(rank, sequence, output);
  }
  std::byte* staging(int rank) const { return memory_.staging(rank); }
  Channel& channel(int src, int dst) const { return memory_.channel(src, dst); }
  std::byte* ring(int src, int dst) const { return memory_.ring(src, dst); }

  // --- waiting (wait.h) ---
  template <class Ready>
  void wait_for(int peer, const Ready& ready, const WaitScope& scope) {
    waiting_.wait_for(peer, ready, scope);
  }
  template <class Ready>
  void wait_all(const Ready& ready, const WaitScope& scope) {
    waiting_.wait_all(ready, scope);
  }
  template <class Ready>
  void look(int first, int last, const Ready& ready, const WaitScope& scope) {
    waiting_.look(first, last, ready, scope);
  }
  template <class Quit>
  void sleep_unless(const Quit& quit, double seconds) {
    waiting_.sleep_unless(quit, seconds);
  }
  template <class Ready>
  void notify_if_last(const Ready& ready) {
    waiting_.notify_if_last(ready);
  }
  template <class Quit>
  void sleep_as_helper(const Quit& quit, bool keen, double seconds) {
    waiting_.sleep_as_helper(quit, keen, seconds);
  }
  void ring_helper(int rank) { waiting_.ring_helper(rank); }
  void notify(int peer) { waiting_.notify(peer); }
  void ring_self() { waiting_.ring_self(); }
  void ring_all();  // wakes all ranks that sleep, after a store that any of them may wait for
  void note_core() { waiting_.note_core(); }
  void beat() { waiting_.beat(); }  // this rank waits, for something that is not here
  double host_timeout() const { return options_.host_timeout; }
  void set_idle_hook(std::function<void()> hook) { waiting_.set_idle_hook(std::move(hook)); }
  void idle() { waiting_.idle(); }  // runs that hook, for a wait elsewhere

  // --- health (health.h) ---
  void check(const OpInfo& op) const { health_.check(op); }
  [[noreturn]] void fail(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) {
    health_.fail(kind, op, peer, text);
  }
  // Throws; the group stays usable.
  [[noreturn]] void raise(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) const {
    identity_.raise(kind, op, peer, text);
  }
  void abort(const std::string& reason) { health_.abort(reason); }
  // Where this is a part of a group, on one of its hosts (hosts/): what goes to and comes from the others.
  void mark_broken(const Reason& reason) { health_.mark_broken(reason); }
  std::optional<Reason> reason() const { return health_.reason(); }
  void set_before_raising(std::function<void()> hook) { health_.set_before_raising(std::move(hook)); }
  bool closed() const { return health_.closed(); }
  void close();
  bool forked() const { return health_.forked(); }
  bool broken() const { return health_.broken(); }
  bool peer_alive(int peer) const { return health_.peer_alive(peer); }
  const Lives& lives() const { return health_.lives(); }
  void set_lives(Lives lives);  // before the group is used
  bool peer_closed(int peer) const { return health_.peer_closed(peer); }

  // --- peers' memory ---
  enum class Reach { none, kernel, pointer };  // how this group can reach an arbitrary buffer of a peer
  Reach reach() const { return reach_; }
  // Address of a peer's buffer in this process, or nullptr where only the kernel can copy it.
  std::byte* map_address(int peer, uint64_t address, uint32_t region) const {
    if (reach_ == Reach::pointer || peer == rank()) return reinterpret_cast<std::byte*>(address);
    return regions_.map(region, peer, address);
  }
  void read_peer(int peer, const void* remote, void* local, size_t nbytes, const OpInfo& op);
  bool may_read(int peer) const;  // now: a rank that has changed its user may not read others
  void write_peer(int peer, void* remote, const void* local, size_t nbytes, const OpInfo& op);

  // --- registered memory (regions.h) ---
  uint32_t next_region() const { return regions_.next(); }
  void add_region(uint32_t region, std::shared_ptr<SharedMemory> memory, size_t stride,
                  std::vector<uint64_t> bases) {
    regions_.add(region, std::move(memory), stride, std::move(bases));
  }
  uint32_t find_region(const void* address, size_t nbytes) const { return regions_.find(address, nbytes); }
  std::byte* at_peer(uint32_t region, int peer, const void* address) const {
    return regions_.at_peer(region, peer, address);
  }
  void drop_region(uint32_t region) { regions_.drop(region); }
  static size_t region_bytes(size_t stride, int world_size) { return Regions::bytes(stride, world_size); }

 private:
  void probe_peers();
  Reach common_reach() const;

  const Identity identity_;
  const TransportOptions options_;
  std::atomic<double> timeout_;  // the options' until set_timeout, which any thread may call
  const Terms terms_;
  GroupMemory memory_;
  Health health_;
  Waiting waiting_;
  HandOff hand_off_;
  Regions regions_;
  Reach reach_ = Reach::none;
  StatusRow* status_ = nullptr;
};

}  // namespace pycomm
