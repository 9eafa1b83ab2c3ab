// health.cc -- see health.h.
#include "health.h"

#include <sched.h>

#include <cstring>

#include "doorbell.h"

namespace pycomm {

namespace {
constexpr int reason_rounds = 10000;  // yields; a reason is written in less than a microsecond
constexpr int rounds_until_claim = 1000;  // of them, until the writer is asked for again whether it lives
}  // namespace

Health::Health(const Identity& identity, GroupMemory& memory, Lives lives)
    : identity_(identity),
      memory_(memory),
      header_(memory.header()),
      lives_(std::move(lives)),
      fork_generation_(fork_generation()) {}

void Health::check(const OpInfo& op) const {
  if (forked())
    identity_.raise(
        ErrorKind::aborted, op, -1,
        "this communicator was created before a fork; only the parent process may use it. Create a "
        "new one in the child.");
  // Read in this order: a peer breaks the group over a closed rank only after closed_ was set there.
  const bool is_broken = broken();
  if (closed()) {
    // Another thread may be about to say it; the caller's buffers are its own again after this.
    memory_.control(identity_.rank).state.store(RankState::closed, std::memory_order_release);
    identity_.raise(ErrorKind::aborted, op, -1, "the communicator is closed");
  }
  if (is_broken) raise_broken(op);
}

void Health::fail(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) {
  // Another rank may be writing its reason at this moment, and may die at it.
  for (int round = 0; round < reason_rounds && !broken(); ++round)
    if (round % rounds_until_claim == 0) mark_broken(kind, op, peer, text);
    else ::sched_yield();
  if (broken()) raise_broken(op);
  identity_.raise(kind, op, peer, text);
}

// [Note: who writes the reason]
bool Health::claim_reason() {
  uint32_t seen = 0;
  while (!header_.broken.compare_exchange_strong(seen, claim_of(identity_.rank)))
    if (seen == told || peer_alive(static_cast<int>(seen / 2))) return false;
  return true;
}

void Health::mark_broken(ErrorKind kind, const OpInfo& op, int peer, const std::string& text) {
  write_reason({kind, op, identity_.number(peer), text}, identity_.rank);
}

void Health::mark_broken(const Reason& reason) { write_reason(reason, elsewhere); }

void Health::write_reason(const Reason& reason, int reporter) {
  if (claim_reason()) {
    header_.kind = static_cast<uint32_t>(reason.kind);
    header_.reporter = reporter;
    header_.peer = reason.number;
    header_.op = static_cast<uint32_t>(reason.op.kind);
    header_.sequence = reason.op.sequence;
    std::strncpy(header_.text, reason.text.c_str(), sizeof(header_.text) - 1);
    header_.broken.store(told, std::memory_order_release);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring_all_sleepers(memory_);
}

std::optional<Reason> Health::reason() const {
  if (!broken()) return std::nullopt;
  Reason reason{static_cast<ErrorKind>(header_.kind),
                {static_cast<OpKind>(header_.op), header_.sequence},
                header_.peer,
                header_.text};
  if (header_.reporter != elsewhere) reason.text += " (seen by " + identity_.name(header_.reporter) + ")";
  return reason;
}

std::string Health::names(const std::vector<int>& peers) const {
  if (peers.size() == 1) return name(peers[0]);
  std::string text = "ranks ";
  for (size_t i = 0; i < peers.size(); ++i)
    text += (i ? ", " : "") + std::to_string(identity_.number(peers[i]));
  return text + (identity_.part() ? " (" + identity_.whole.host + ")" : "");
}

void Health::set_before_raising(std::function<void()> hook) {
  std::lock_guard lock(raising_);
  before_raising_ = std::move(hook);
}

void Health::prepare_raising() const {
  std::lock_guard lock(raising_);
  if (before_raising_) before_raising_();
}

void Health::raise_broken(const OpInfo& op) const {
  prepare_raising();
  const OpInfo origin{static_cast<OpKind>(header_.op), header_.sequence};
  std::string text = header_.reporter == identity_.rank ? header_.text : reason()->text;
  if (op.kind != origin.kind || op.sequence != origin.sequence)
    if (origin.kind != OpKind::none)
      text += std::string(", in ") + to_string(origin.kind) + " #" + std::to_string(origin.sequence);
  text += ". The group is broken: close it and create a new one.";
  throw identity_.error_about(static_cast<ErrorKind>(header_.kind), op, header_.peer, text);
}

void Health::abort(const std::string& reason) {
  if (forked()) return;  // a forked child must not speak for its parent
  mark_broken(ErrorKind::aborted, {}, identity_.rank,
              identity_.name(identity_.rank) + " aborted the group" + (reason.empty() ? "" : ": " + reason));
  prepare_raising();
}

bool Health::peer_alive(int peer) const {
  if (!lives_.alive(peer)) return false;
  const RankControl &mine = memory_.control(identity_.rank), &other = memory_.control(peer);
  const bool can_ask =
      mine.cma_ok.load(std::memory_order_relaxed) && other.process_token != mine.process_token;
  return !can_ask || !process_ends(other.pid, other.probe_address);
}

bool Health::close() {
  if (closed_.exchange(true)) return false;
  if (forked()) return true;  // a forked child must not speak for its parent
  memory_.control(identity_.rank).state.store(RankState::closed, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ring_all_sleepers(memory_);
  return true;
}

}  // namespace pycomm
