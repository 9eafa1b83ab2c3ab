// transport.h -- one rank's view of a group on one node: shared memory, flags, waiting, liveness, peers' memory.
//
// It knows ranks, bytes and flags, and nothing about collectives or element types. All waiting is in wait.cc.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../error.h"
#include "../memory/segment.h"
#include "../store/store.h"
#include "layout.h"

namespace pycomm {

// For groups that come to move device memory, too; the transport only keeps them (cuda/group.h).
struct DeviceOptions {
  size_t staging_bytes = 0;     // per rank, in device memory; 0: 16 MiB
  std::string protocol;         // "", "resident" or "stream_ordered"
  int connections = 0;          // CUDA_DEVICE_MAX_CONNECTIONS; 0: unset
};

struct TransportOptions {
  std::string name;             // of the group: separates keys in the store, shown in errors
  double timeout = 300.0;       // seconds, for the rendezvous and as default for operations
  size_t staging_bytes = 0;     // 0: 8 MiB for the first group of the processes, 1 MiB for each further one
  std::string host_id;          // overrides the identity of the host
  bool use_cma = true;          // read peers' memory by process_vm_readv where the kernel allows it
  int threads = 1;              // worker threads per rank (lanes)
  DeviceOptions device;
};

// How a wait ends early. Passed by reference through a whole operation.
struct WaitScope {
  OpInfo op;
  std::chrono::steady_clock::time_point deadline;
  double timeout;               // seconds, for the message
  bool any_peer = false;        // one of the peers suffices: those that closed the group are not missed while one is left
  bool patient = false;         // a worker thread: sleeps early, the cores belong to the caller
};

using ReadyFn = bool (*)(const void* context, int peer);

class Transport {
 public:
  static std::unique_ptr<Transport> join(Store& store, int rank, int world_size, const TransportOptions& options);
  ~Transport();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& name() const { return options_.name; }
  int lanes() const { return lanes_; }
  int cores() const { return cores_; }  // that the ranks of the group may run on, together
  bool oversubscribed() const { return world_size_ > cores_; }
  size_t staging_bytes() const { return layout_.staging_bytes; }
  size_t ring_bytes() const { return layout_.ring_bytes; }
  size_t budget_bytes() const { return budget_; }
  double timeout() const { return options_.timeout; }
  void set_timeout(double seconds) { options_.timeout = seconds; }

  // --- shared memory ---
  RankControl& control(int rank) const { return controls_[rank]; }
  OpSlot& slot(int rank, uint64_t sequence) const { return *reinterpret_cast<OpSlot*>(rank_base(rank) + (sequence & 1) * sizeof(OpSlot)); }
  PartRef* parts(int rank, uint64_t sequence, bool output) const {
    return reinterpret_cast<PartRef*>(rank_base(rank) + 2 * sizeof(OpSlot)) + ((sequence & 1) * 2 + output) * world_size_;
  }
  std::byte* staging(int rank) const { return rank_base(rank) + 2 * sizeof(OpSlot) + layout_.tables_bytes(); }
  Channel& channel(int src, int dst) const {
    return *reinterpret_cast<Channel*>(base_ + channels_ + (static_cast<size_t>(src) * world_size_ + dst) * channel_stride_);
  }
  std::byte* ring(int src, int dst) const { return reinterpret_cast<std::byte*>(&channel(src, dst)) + sizeof(Channel); }

  // --- waiting (wait.cc) ---
  // Returns when ready(peer) is true for every peer in [first, last) other than this rank, or for `first` alone if last is 0.
  // Throws CommError: timeout (naming who is missing), peer death, abort. ready must be an acquire load and cheap.
  template <class Ready>
  void wait_for(int peer, const Ready& ready, const WaitScope& scope) {
    if (!spin(peer, peer + 1, ready, scope)) wait_slowly(peer, peer + 1, &call<Ready>, &ready, scope);
  }
  template <class Ready>
  void wait_all(const Ready& ready, const WaitScope& scope) {
    if (!spin(0, world_size_, ready, scope)) wait_slowly(0, world_size_, &call<Ready>, &ready, scope);
  }
  // One look at everything that could end such a wait early, for those who poll instead of waiting. Throws, or returns.
  template <class Ready>
  void look(int first, int last, const Ready& ready, const WaitScope& scope) {
    examine(first, last, &call<Ready>, &ready, scope);
  }
  // Sleeps at most `seconds` until somebody rings this rank's doorbell, unless quit() already holds.
  template <class Quit>
  void sleep_unless(const Quit& quit, double seconds) {
    sleep_on_doorbell([](const void* q) { return (*static_cast<const Quit*>(q))(); }, &quit, seconds);
  }
  // Says where this rank runs, so that peers do not spin on the core that it needs.
  void note_core();
  // After a release store that `peer` may sleep for.
  void notify(int peer);
  // After a release store that makes `ready(self)` true: wakes the sleepers if it is now true for all ranks. Sleepers that wait
  // for all ranks are woken once, by the last to arrive, instead of n-1 times.
  template <class Ready>
  void notify_if_last(const Ready& ready) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // orders our store before the look at `sleepers`; pairs with wait.cc
    if (!anyone_sleeps()) return;
    for (int p = 0; p < world_size_; ++p)
      if (!ready(p)) return;
    ring_all();
  }
  void ring_all();
  void ring_self();
  void set_idle_hook(std::function<void()> hook) { idle_hook_ = std::move(hook); }

  // --- health ---
  void check(const OpInfo& op) const;  // throws if the group is broken, closed or was carried over a fork
  [[noreturn]] void fail(ErrorKind kind, const OpInfo& op, int peer, const std::string& text);  // breaks the group, then throws
  [[noreturn]] void raise(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) const;  // throws; the group stays usable
  void abort(const std::string& reason);
  void close();
  bool forked() const;  // this process is a forked child of the one that joined
  bool broken() const { return header_->broken.load(std::memory_order_acquire) == 2; }
  bool peer_alive(int peer) const;
  bool peer_closed(int peer) const { return controls_[peer].state.load(std::memory_order_acquire) == RankState::closed; }
  const DeviceOptions& device_options() const { return options_.device; }
  std::string where(const OpInfo& op) const;  // "[rank 2/4] all_reduce #17: "

  // --- peers' memory ---
  enum class Reach { none, kernel, pointer };   // how this group can reach an arbitrary buffer of a peer
  Reach reach() const { return reach_; }
  // Address of a peer's buffer in this process, or nullptr where only the kernel can copy it.
  std::byte* map_address(int peer, uint64_t address, uint32_t region) const;
  void read_peer(int peer, const void* remote, void* local, size_t nbytes, const OpInfo& op);
  void write_peer(int peer, void* remote, const void* local, size_t nbytes, const OpInfo& op);

  // A registered region: one segment, mapped by every rank, of `stride` bytes per rank and a count. Ids start at 1.
  //
  // [Note: end of a registered region] Each rank frees its part when it likes, with its tensor: no later operation finds the part, and its
  // pages are given back. Peers may use theirs meanwhile, and a worker thread of this rank may just be at one through this rank's mapping.
  // So a region is unmapped only when all ranks have freed their parts; they count that behind the parts. Each rank looks with every
  // region that it adds or drops. In a broken group an operation may have ended here and not yet there: it unmaps at its end.
  uint32_t add_region(std::unique_ptr<Segment> segment, size_t stride);
  void set_region_base(uint32_t region, int peer, uint64_t base);
  std::shared_ptr<Segment> region_segment(uint32_t region) const;
  uint32_t find_region(const void* address, size_t nbytes) const;  // 0: none
  // What `peer` has at the place of its part where this rank has `address` in its own; an address in this process.
  std::byte* at_peer(uint32_t region, int peer, const void* address) const;
  void drop_region(uint32_t region);  // not collective
  static size_t region_bytes(size_t stride, int world_size) { return stride * world_size + region_count_bytes; }

 private:
  static constexpr size_t region_count_bytes = 4096;
  struct Region {
    std::shared_ptr<Segment> segment;
    size_t stride = 0;
    std::vector<uint64_t> bases;  // of each rank, in its own address space
    bool dropped = false;         // by this rank
  };

  Transport() = default;
  template <class Ready>
  static bool call(const void* ready, int peer) {
    return (*static_cast<const Ready*>(ready))(peer);
  }
  template <class Ready>
  bool spin(int first, int last, const Ready& ready, const WaitScope& scope) const;
  void wait_slowly(int first, int last, ReadyFn ready, const void* context, const WaitScope& scope);
  void examine(int first, int last, ReadyFn ready, const void* context, const WaitScope& scope);
  void sleep_on_doorbell(bool (*quit)(const void*), const void* context, double seconds);
  bool anyone_sleeps() const;
  void beat();
  void leave_shared_core(std::chrono::steady_clock::time_point now);
  bool shares_core(int peer) const {
    return controls_[peer].core.load(std::memory_order_relaxed) == controls_[rank_].core.load(std::memory_order_relaxed);
  }
  bool has_heartbeat(int peer) const;
  std::byte* rank_base(int rank) const { return base_ + ranks_ + rank * rank_stride_; }
  std::atomic_ref<uint32_t> num_dropped(const Region& region) const;
  void unmap_dropped_regions();  // with the lock
  void connect(Store& store);
  void map(const Layout& layout);
  void probe_peers();
  void mark_broken(ErrorKind kind, const OpInfo& op, int peer, const std::string& text);
  [[noreturn]] void raise_broken(const OpInfo& op) const;

  TransportOptions options_;
  int rank_ = 0;
  int world_size_ = 1;
  int lanes_ = 1;
  int cores_ = 1;
  std::chrono::steady_clock::time_point next_hop_{};
  bool primary_ = false;
  size_t budget_ = 0;
  Layout layout_{};
  size_t ranks_ = 0, rank_stride_ = 0, channels_ = 0, channel_stride_ = 0;
  std::unique_ptr<Segment> segment_;
  std::byte* base_ = nullptr;
  GroupHeader* header_ = nullptr;
  RankControl* controls_ = nullptr;
  Reach reach_ = Reach::none;
  std::atomic<bool> closed_{false};
  uint64_t fork_generation_ = 0;
  std::map<uint32_t, Region> regions_;
  uint32_t last_region_ = 0;
  mutable std::mutex regions_mutex_;
  std::atomic<int> live_regions_{0};
  std::function<void()> idle_hook_;
};

// Bumped in the child of every fork.
uint64_t fork_generation();

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline constexpr int spins_before_slow = 1000;     // pause instructions: 30 to 50 us on recent x86, longer than any small operation
inline constexpr int spins_of_the_patient = 50;
inline constexpr int spins_before_core_check = 20;

template <class Ready>
bool Transport::spin(int first, int last, const Ready& ready, const WaitScope& scope) const {
  int spins = 0;
  const int limit = oversubscribed() ? 0 : scope.patient ? spins_of_the_patient : spins_before_slow;
  for (int p = first; p < last; ++p) {
    if (p == rank_) continue;
    while (!ready(p)) {
      if (++spins > limit || (spins == spins_before_core_check && shares_core(p))) return false;
      cpu_relax();
    }
  }
  return true;
}

}  // namespace pycomm
