// join.cc -- see join.h.
#include "join.h"

#include <sys/uio.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cores.h"
#include "kernel_copy.h"
#include "process.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t primary_budget = 8 << 20;
constexpr size_t further_budget = 1 << 20;
constexpr int max_ranks = 1024;

// What follows from the records; the same on every rank.
Transport::Terms settle_terms(const Identity& identity, const TransportOptions& options,
                              const std::vector<Record>& records) {
  Transport::Terms terms;
  terms.lanes = max_lanes;
  int further = 0;
  for (int p = 0; p < identity.world_size; ++p) {
    further |= records[p].primary;
    terms.lanes = std::min(terms.lanes, std::max(1, records[p].threads));
  }
  terms.primary = !further;
  terms.budget = options.staging_bytes ? options.staging_bytes
                 : terms.primary       ? primary_budget
                                       : further_budget;
  std::vector<std::string> masks;
  for (const Record& record : records) masks.push_back(record.cores);
  terms.cores = count_cores(masks);
  terms.one_cache = records[0].cache.empty() || all_within(masks, records[0].cache);
  return terms;
}

std::unique_ptr<SharedMemory> share_memory(Rendezvous& rendezvous, const Identity& identity,
                                           const Transport::Terms& terms, const TransportOptions& options) {
  const size_t nbytes = Layout::make(identity.world_size, terms.budget, terms.lanes).total();
  auto memory = rendezvous.share_memory(nbytes);
  if (memory->nbytes() != nbytes)
    identity.raise(ErrorKind::mismatch, {}, 0,
                   "staging_bytes=" + std::to_string(terms.budget) +
                       " here differs from that of rank 0. All ranks must pass equal values.");
  if (identity.rank == 0) {
    auto* header = reinterpret_cast<GroupHeader*>(memory->data());
    header->version = layout_version;
    header->world_size = identity.world_size;
    if (options.write_note) options.write_note(identity.world_size, terms.cores, header->note);
  }
  return memory;
}

}  // namespace

Joining::Joining(Store& store, int rank, int world_size, const TransportOptions& options)
    : options_(options), identity_{options.name, rank, world_size, options.whole} {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw std::invalid_argument("pycomm: rank " + std::to_string(rank) +
                                " is not in [0, world_size=" + std::to_string(world_size) + ")");
  if (world_size > max_ranks)
    throw std::invalid_argument("pycomm: world_size=" + std::to_string(world_size) + " exceeds " +
                                std::to_string(max_ranks) + " ranks in a group");
  const std::chrono::duration<double> limit(std::min(options.timeout, longest_timeout));
  scope_ = {{}, Clock::now() + std::chrono::duration_cast<Clock::duration>(limit), options.timeout};
  rendezvous_.emplace(store, identity_, scope_, options.place);
  telling([this] {
    Record mine = own_record(options_.host_id);
    mine.primary = has_primary_group();
    mine.threads = options_.threads;
    records_ = rendezvous_->meet(std::move(mine));
    return 0;
  });
}

bool Joining::one_host() const {
  return std::all_of(records_.begin(), records_.end(),
                     [this](const Record& record) { return record.host == records_[0].host; });
}

std::unique_ptr<Transport> Joining::transport() {
  return telling([this] {
    const Transport::Terms terms = settle_terms(identity_, options_, records_);
    auto memory = share_memory(*rendezvous_, identity_, terms, options_);
    transport_ =
        std::make_unique<Transport>(identity_, options_, terms, std::move(memory), rendezvous_->lives());
    transport_->meet(scope_);
    transport_->set_lives(rendezvous_->lasting_lives(records_));
    rendezvous_->complete();
    return std::move(transport_);
  });
}

void Joining::tell(const CommError& error) {
  if (const auto cause = rendezvous_->told()) throw *cause;
  rendezvous_->tell(error);
  throw error;
}

void Joining::tell_own(const std::exception& error) {
  if (const auto cause = rendezvous_->told()) throw *cause;
  const std::string text = "creating the group: " + std::string(error.what());
  const CommError failure =
      identity_.error_about(ErrorKind::none, {}, identity_.number(identity_.rank), text);
  rendezvous_->tell(failure);
  if (transport_)
    transport_->mark_broken(
        {ErrorKind::peer, {}, failure.peer, identity_.name(identity_.rank) + " failed: " + text});
  throw failure;
}

// Steps 2 and 3.
void Transport::meet(const WaitScope& scope) {
  RankControl& self = control(rank());
  self.process_token = process_token();
  self.probe_address = reinterpret_cast<uint64_t>(&process_token());
  self.probe_target = reinterpret_cast<uint64_t>(&pycomm::probe_target());
  self.pid = ::getpid();
  note_core();
  if (rank() == 0) hand_off_.guess(!terms_.one_cache);
  auto in_state = [this](RankState state) {
    return [this, state](int p) { return control(p).state.load(std::memory_order_acquire) >= state; };
  };
  self.state.store(RankState::joined, std::memory_order_release);
  ring_all_sleepers(memory_);
  wait_all(in_state(RankState::joined), scope);
  probe_peers();
  self.state.store(RankState::ready, std::memory_order_release);
  ring_all_sleepers(memory_);
  wait_all(in_state(RankState::ready), scope);
  reach_ = common_reach();
  if (measures_hand_off()) hand_off_.begin(scope);
}

// Both ways: a sandbox may allow the one and not the other. A number that is not the peer's, but of another
// process (in another pid namespace), is found out by the token before anything is written there.
void Transport::probe_peers() {
  uint32_t ok = options_.use_cma && kernel_admits_peers();
  for (int p = 0; p < world_size() && ok; ++p) {
    if (p == rank()) continue;
    uint64_t token = 0;
    const iovec local{&token, sizeof(token)};
    const iovec remote{reinterpret_cast<void*>(control(p).probe_address), sizeof(token)};
    const iovec target{reinterpret_cast<void*>(control(p).probe_target), sizeof(token)};
    ok = ::process_vm_readv(control(p).pid, &local, 1, &remote, 1, 0) == sizeof(token) &&
         token == control(p).process_token &&
         ::process_vm_writev(control(p).pid, &local, 1, &target, 1, 0) == sizeof(token);
  }
  control(rank()).cma_ok.store(ok, std::memory_order_relaxed);  // published by the release store of `ready`
}

Transport::Reach Transport::common_reach() const {
  bool one_process = true, cma = true;
  for (int p = 0; p < world_size(); ++p) {
    one_process &= control(p).process_token == process_token();
    cma &= control(p).cma_ok.load(std::memory_order_relaxed) == 1;
  }
  return one_process ? Reach::pointer : cma ? Reach::kernel : Reach::none;
}

}  // namespace pycomm
