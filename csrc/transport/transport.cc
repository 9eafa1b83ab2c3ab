// transport.cc -- joining a group on one node, its health, and access to peers' memory. Waiting is in wait.cc.
//
// Joining, in order (rank 0 is the leader):
//   1  every rank puts its record {host identity, process token, whether it already has a group, threads} into the store,
//      the leader adds the name of its socket; every rank reads all records: all know the same and decide alike
//   2  the leader creates the segment and hands its descriptor to every peer
//   3  every rank maps it, takes its record lock ([Note: liveness by record locks]), says `joined` and waits for all
//   4  every rank tries to read a token out of every peer's memory, says `ready` with the result and waits for all
//   5  the records leave the store; from here on only shared memory is used
#include "transport.h"

#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "../memory/fd_channel.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t primary_budget = 8 << 20;
constexpr size_t further_budget = 1 << 20;
constexpr int reason_rounds = 10000;  // yields; a reason is written in less than a microsecond

std::atomic<uint64_t> forks{0};

// Random per process and renewed in a forked child, so that it tells processes apart across pid namespaces.
struct ProcessIdentity {
  uint64_t token;
  std::atomic<int> primary_groups{0};

  ProcessIdentity() {
    renew();
    ::pthread_atfork(nullptr, nullptr, [] {
      forks.fetch_add(1);
      process().renew();
      process().primary_groups = 0;
    });
  }
  void renew() { token = std::stoull(random_token().substr(0, 16), nullptr, 16) | 1; }
  static ProcessIdentity& process() {
    static ProcessIdentity identity;
    return identity;
  }
};

// Ranks with the same identity can share memory: one kernel, one network namespace (abstract sockets), one user.
std::string host_identity(const std::string& override_id) {
  if (!override_id.empty()) return override_id;
  std::string boot = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network{};
  ::stat("/proc/self/ns/net", &network);
  return boot + "-" + std::to_string(network.st_ino) + "-" + std::to_string(::geteuid());
}

// The cores this process may run on. A launcher may have pinned every rank to cores of its own, so only the union over all ranks
// tells whether they outnumber the cores.
cpu_set_t allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) CPU_SET(0, &set);
  return set;
}

std::string to_hex(const cpu_set_t& set) {
  std::string hex;
  for (int digit = 0; digit < CPU_SETSIZE / 4; ++digit) {
    int value = 0;
    for (int bit = 0; bit < 4; ++bit) value |= CPU_ISSET(digit * 4 + bit, &set) ? 1 << bit : 0;
    hex += "0123456789abcdef"[value];
  }
  return hex.substr(0, hex.find_last_not_of('0') + 1);
}

void add_hex(cpu_set_t& set, const std::string& hex) {
  for (size_t digit = 0; digit < hex.size(); ++digit)
    for (int bit = 0; bit < 4; ++bit)
      if (std::string("0123456789abcdef").find(hex[digit]) >> bit & 1) CPU_SET(digit * 4 + bit, &set);
}

struct Record {
  std::string host, cores, socket;
  uint64_t token = 0;
  int primary = 0, threads = 1;

  std::string pack() const {
    std::ostringstream out;
    out << layout_version << ' ' << host << ' ' << token << ' ' << primary << ' ' << threads << ' ' << cores << ' '
        << (socket.empty() ? "-" : socket);
    return out.str();
  }
  static Record unpack(const std::string& text) {
    Record record;
    uint64_t version = 0;
    std::istringstream(text) >> version >> record.host >> record.token >> record.primary >> record.threads >> record.cores >> record.socket;
    if (version != layout_version) throw std::runtime_error("pycomm: the ranks of this group run different versions of pycomm");
    return record;
  }
};

}  // namespace

uint64_t fork_generation() { return forks.load(std::memory_order_relaxed); }

std::unique_ptr<Transport> Transport::join(Store& store, int rank, int world_size, const TransportOptions& options) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw std::invalid_argument("pycomm: rank " + std::to_string(rank) + " is not in [0, world_size=" + std::to_string(world_size) + ")");
  if (world_size > 1024)
    throw std::invalid_argument("pycomm: world_size=" + std::to_string(world_size) + " exceeds 1024 ranks on one node");
  std::unique_ptr<Transport> transport(new Transport());
  transport->options_ = options;
  transport->rank_ = rank;
  transport->world_size_ = world_size;
  transport->connect(store);
  return transport;
}

void Transport::connect(Store& store) {
  ProcessIdentity& process = ProcessIdentity::process();
  fork_generation_ = forks.load();
  const WaitScope scope{{OpKind::none, 0},
                        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.timeout)),
                        options_.timeout};

  // A group of the same name may be created again: the how-manieth creation this is keeps their keys apart.
  const std::string prefix = "pycomm/" + options_.name + "/";
  const std::string round = prefix + std::to_string(store.add(prefix + "round/" + std::to_string(rank_), 1)) + "/";

  std::unique_ptr<FdServer> server;
  Record mine{host_identity(options_.host_id),   to_hex(allowed_cores()), "", process.token,
              process.primary_groups.load() > 0, options_.threads};
  if (rank_ == 0 && world_size_ > 1) mine.socket = (server = std::make_unique<FdServer>())->name();
  store.set(round + std::to_string(rank_), mine.pack());

  std::vector<Record> records(world_size_);
  auto pause = std::chrono::microseconds(100);
  for (int p = 0; p < world_size_; ++p) {
    std::string key = round + std::to_string(p);
    while (p != rank_ && !store.has({key})) {
      if (Clock::now() > scope.deadline) {
        std::string missing;
        for (int q = p; q < world_size_; ++q)
          if (q != rank_ && !store.has({round + std::to_string(q)})) missing += (missing.empty() ? "" : ", ") + std::to_string(q);
        raise(ErrorKind::timeout, scope.op, p,
              "creating the group: rank(s) " + missing + " did not arrive within the timeout of " +
                  std::to_string(static_cast<long>(options_.timeout)) + " s");
      }
      std::this_thread::sleep_for(pause);
      if (pause < std::chrono::milliseconds(5)) pause *= 2;
    }
    records[p] = Record::unpack(p == rank_ ? mine.pack() : store.get(key));
  }

  int further = 0;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  lanes_ = max_lanes;
  for (int p = 0; p < world_size_; ++p) {
    if (records[p].host != mine.host)
      raise(ErrorKind::mismatch, scope.op, p,
            "rank " + std::to_string(p) +
                " is on another host (or in another network namespace, or of another user); a "
                "pycomm group must lie on one node. Use one group per node and another backend between nodes.");
    further |= records[p].primary;
    add_hex(cores, records[p].cores);
    lanes_ = std::min(lanes_, std::max(1, records[p].threads));
  }
  primary_ = !further;
  if (primary_) process.primary_groups.fetch_add(1);
  budget_ = options_.staging_bytes ? options_.staging_bytes : primary_ ? primary_budget : further_budget;
  cores_ = std::max(1, CPU_COUNT(&cores));

  const Layout layout = Layout::make(world_size_, budget_, lanes_);
  if (rank_ == 0) {
    segment_ = Segment::create(layout.total());
    map(layout);
    header_->version = layout_version;
    header_->world_size = world_size_;
  } else {
    segment_ = Segment::open(receive_fd(records[0].socket, scope.deadline));
    if (segment_->nbytes() != layout.total())
      raise(ErrorKind::mismatch, scope.op, 0,
            "staging_bytes=" + std::to_string(budget_) + " here differs from that of rank 0. All ranks must pass equal values.");
    map(layout);
  }

  RankControl& self = controls_[rank_];
  self.process_token = process.token;
  self.probe_address = reinterpret_cast<uint64_t>(&process.token);
  self.pid = ::getpid();
  note_core();
  segment_->hold_lock(rank_);
  self.state.store(RankState::joined, std::memory_order_release);
  if (server) server->serve(segment_->fd(), world_size_ - 1, scope.deadline);
  auto in_state = [this](RankState state) {
    return [this, state](int p) { return controls_[p].state.load(std::memory_order_acquire) >= state; };
  };
  ring_all();
  wait_all(in_state(RankState::joined), scope);

  probe_peers();
  self.state.store(RankState::ready, std::memory_order_release);
  ring_all();
  wait_all(in_state(RankState::ready), scope);
  bool one_process = true, cma = true;
  for (int p = 0; p < world_size_; ++p) {
    one_process &= controls_[p].process_token == process.token;
    cma &= controls_[p].cma_ok.load(std::memory_order_relaxed) == 1;
  }
  reach_ = one_process ? Reach::pointer : cma ? Reach::kernel : Reach::none;
  store.remove(round + std::to_string(rank_));
}

void Transport::map(const Layout& layout) {
  layout_ = layout;
  base_ = segment_->data();
  header_ = reinterpret_cast<GroupHeader*>(base_);
  controls_ = reinterpret_cast<RankControl*>(base_ + layout.controls());
  ranks_ = layout.ranks();
  rank_stride_ = layout.rank_stride();
  channels_ = layout.channels();
  channel_stride_ = layout.channel_stride();
}

void Transport::probe_peers() {
  uint32_t ok = options_.use_cma;
  for (int p = 0; p < world_size_ && ok; ++p) {
    if (p == rank_) continue;
    uint64_t token = 0;
    iovec local{&token, sizeof(token)};
    iovec remote{reinterpret_cast<void*>(controls_[p].probe_address), sizeof(token)};
    ok = ::process_vm_readv(controls_[p].pid, &local, 1, &remote, 1, 0) == sizeof(token) && token == controls_[p].process_token;
  }
  controls_[rank_].cma_ok.store(ok, std::memory_order_relaxed);  // published by the release store of `ready`
}

Transport::~Transport() { close(); }

void Transport::close() {
  if (closed_.exchange(true)) return;
  if (primary_ && !forked()) ProcessIdentity::process().primary_groups.fetch_sub(1);
  if (!header_ || forked()) return;  // a forked child must not speak for its parent
  controls_[rank_].state.store(RankState::closed, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring_all();
}

bool Transport::forked() const { return fork_generation_ != forks.load(std::memory_order_relaxed); }

bool Transport::peer_alive(int peer) const {
  if (controls_[peer].state.load(std::memory_order_acquire) == RankState::absent) return true;  // not joined yet: no lock to hold
  if (controls_[peer].process_token == controls_[rank_].process_token) return true;              // a thread of this process
  return segment_->lock_held(peer);
}

// --- errors ---------------------------------------------------------------------------------------------------------------------

std::string Transport::where(const OpInfo& op) const {
  std::string text = "[rank " + std::to_string(rank_) + "/" + std::to_string(world_size_);
  if (!options_.name.empty() && options_.name != "default") text += " of group " + options_.name;
  text += "] ";
  if (op.kind != OpKind::none) {
    text += to_string(op.kind);
    if (op.sequence) text += " #" + std::to_string(op.sequence);
    text += ": ";
  }
  return text;
}

void Transport::check(const OpInfo& op) const {
  if (forked())
    raise(ErrorKind::aborted, op, -1,
          "this communicator was created before a fork; only the parent process may use it. Create a new one in the child.");
  if (closed_.load(std::memory_order_relaxed)) raise(ErrorKind::aborted, op, -1, "the communicator is closed");
  if (broken()) raise_broken(op);
}

void Transport::raise(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) const {
  throw CommError(kind, where(op) + text, rank_, world_size_, op, peer);
}

void Transport::mark_broken(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) {
  uint32_t expected = 0;
  if (header_->broken.compare_exchange_strong(expected, 1)) {
    header_->kind = static_cast<uint32_t>(kind);
    header_->reporter = rank_;
    header_->peer = peer;
    header_->op = static_cast<uint32_t>(op.kind);
    header_->sequence = op.sequence;
    std::strncpy(header_->text, text.c_str(), sizeof(header_->text) - 1);
    header_->broken.store(2, std::memory_order_release);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring_all();
}

void Transport::fail(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) {
  if (!broken()) mark_broken(kind, op, peer, text);
  // Another rank may be writing its reason at this moment, and may die at it.
  for (int round = 0; round < reason_rounds && !broken(); ++round) ::sched_yield();
  if (broken()) raise_broken(op);
  raise(kind, op, peer, text);
}

void Transport::raise_broken(const OpInfo& op) const {
  const auto kind = static_cast<ErrorKind>(header_->kind);
  const OpInfo origin{static_cast<OpKind>(header_->op), header_->sequence};
  std::string text = header_->text;
  if (header_->reporter != rank_) text += " (seen by rank " + std::to_string(header_->reporter) + ")";
  if (op.kind != origin.kind || op.sequence != origin.sequence)
    if (origin.kind != OpKind::none) text += std::string(", in ") + to_string(origin.kind) + " #" + std::to_string(origin.sequence);
  text += ". The group is broken: close it and create a new one.";
  raise(kind, op, header_->peer, text);
}

void Transport::abort(const std::string& reason) {
  if (forked()) return;  // a forked child must not speak for its parent
  mark_broken(ErrorKind::aborted, {}, rank_,
              "rank " + std::to_string(rank_) + " aborted the group" + (reason.empty() ? "" : ": " + reason));
}

// --- peers' memory --------------------------------------------------------------------------------------------------------------

std::byte* Transport::map_address(int peer, uint64_t address, uint32_t region) const {
  if (reach_ == Reach::pointer || peer == rank_) return reinterpret_cast<std::byte*>(address);
  if (region == 0) return nullptr;
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return nullptr;
  const Region& entry = found->second;
  return entry.segment->data() + peer * entry.stride + (address - entry.bases[peer]);
}

void Transport::read_peer(int peer, const void* remote, void* local, size_t nbytes, const OpInfo& op) {
  size_t done = 0;
  while (done < nbytes) {
    iovec to{static_cast<std::byte*>(local) + done, nbytes - done};
    iovec from{const_cast<std::byte*>(static_cast<const std::byte*>(remote)) + done, nbytes - done};
    ssize_t n = ::process_vm_readv(controls_[peer].pid, &to, 1, &from, 1, 0);
    if (n <= 0)
      fail(ErrorKind::peer, op, peer, "rank " + std::to_string(peer) + " died while its memory was read (" + std::strerror(errno) + ")");
    done += static_cast<size_t>(n);
  }
}

void Transport::write_peer(int peer, void* remote, const void* local, size_t nbytes, const OpInfo& op) {
  size_t done = 0;
  while (done < nbytes) {
    iovec from{const_cast<std::byte*>(static_cast<const std::byte*>(local)) + done, nbytes - done};
    iovec to{static_cast<std::byte*>(remote) + done, nbytes - done};
    ssize_t n = ::process_vm_writev(controls_[peer].pid, &from, 1, &to, 1, 0);
    if (n <= 0)
      fail(ErrorKind::peer, op, peer, "rank " + std::to_string(peer) + " died while its memory was written (" + std::strerror(errno) + ")");
    done += static_cast<size_t>(n);
  }
}

uint32_t Transport::add_region(std::unique_ptr<Segment> segment, size_t stride) {
  std::lock_guard lock(regions_mutex_);
  unmap_dropped_regions();
  regions_[++last_region_] = {std::move(segment), stride, std::vector<uint64_t>(world_size_)};
  live_regions_.fetch_add(1);
  return last_region_;
}

void Transport::set_region_base(uint32_t region, int peer, uint64_t base) {
  std::lock_guard lock(regions_mutex_);
  regions_.at(region).bases[peer] = base;
}

std::shared_ptr<Segment> Transport::region_segment(uint32_t region) const {
  std::lock_guard lock(regions_mutex_);
  return regions_.at(region).segment;
}

uint32_t Transport::find_region(const void* address, size_t nbytes) const {
  if (live_regions_.load(std::memory_order_relaxed) == 0) return 0;
  std::lock_guard lock(regions_mutex_);
  const auto begin = reinterpret_cast<uint64_t>(address);
  for (const auto& [id, region] : regions_) {
    if (region.dropped) continue;
    const uint64_t base = region.bases[rank_];
    if (begin >= base && begin + nbytes <= base + region.stride) return id;
  }
  return 0;
}

std::byte* Transport::at_peer(uint32_t region, int peer, const void* address) const {
  std::lock_guard lock(regions_mutex_);
  const Region& entry = regions_.at(region);
  return entry.segment->data() + peer * entry.stride + (reinterpret_cast<uint64_t>(address) - entry.bases[rank_]);
}

void Transport::drop_region(uint32_t region) {
  if (forked()) return;  // the memory is the parent's
  std::lock_guard lock(regions_mutex_);
  Region& entry = regions_.at(region);
  entry.dropped = true;
  live_regions_.fetch_sub(1);
  entry.segment->give_back(rank_ * entry.stride, entry.stride);
  num_dropped(entry).fetch_add(1, std::memory_order_acq_rel);
  unmap_dropped_regions();
}

std::atomic_ref<uint32_t> Transport::num_dropped(const Region& region) const {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(region.segment->data() + world_size_ * region.stride));
}

void Transport::unmap_dropped_regions() {
  if (broken()) return;
  std::erase_if(regions_, [this](const auto& entry) {
    const Region& region = entry.second;
    return region.dropped && num_dropped(region).load(std::memory_order_acquire) == static_cast<uint32_t>(world_size_);
  });
}

}  // namespace pycomm
