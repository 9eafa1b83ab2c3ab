// across.cc -- see across.h.
#include "across.h"

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include "../transport/interrupt.h"
#include "collectives.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto tick = std::chrono::milliseconds(20);
constexpr auto until_reason = std::chrono::seconds(1);  // for whoever knows better to say it
constexpr auto grace = std::chrono::milliseconds(500);  // [Note: limits inside]
constexpr auto longest_pause = std::chrono::seconds(2);  // of the ticker: this rank was stopped itself

void compare_calls(Agreement& agreement) {
  agreement.begin();
  agreement.conclude();
}

void run_kind(Operation& operation, Agreement& agreement) {
  if (operation.op.on_device && operation.op.kind != OpKind::all_to_all) return compare_calls(agreement);
  switch (operation.op.kind) {
    case OpKind::all_reduce: return across::all_reduce(operation, agreement);
    case OpKind::reduce: return across::reduce(operation, agreement);
    case OpKind::broadcast: return across::broadcast(operation, agreement);
    case OpKind::all_gather: return across::all_gather(operation, agreement);
    case OpKind::reduce_scatter: return across::reduce_scatter(operation, agreement);
    case OpKind::all_to_all: return across::all_to_all(operation, agreement);
    case OpKind::gather: return across::gather(operation, agreement);
    case OpKind::scatter: return across::scatter(operation, agreement);
    case OpKind::barrier: return compare_calls(agreement);
    default: throw std::logic_error("pycomm: unknown collective");
  }
}

}  // namespace

Across::Across(Placement placement, int rank, std::shared_ptr<Communicator> inside, Wires wires)
    : placement_(std::move(placement)),
      rank_(rank),
      host_(placement_.host_of[rank]),
      inside_(std::move(inside)),
      board_(*inside_, placement_.world_size()),
      wires_(std::move(wires)),
      pulse_seen_(Clock::now()),
      pulse_looked_at_(pulse_seen_),
      ticker_(
          std::make_unique<Ticker>(tick, leads() ? std::function<void()>() : [this] { look_at_pulse(); })) {
  if (leads())
    speaker_ = std::make_unique<Speaker>(placement_, host_, *wires_.control, transport(), board_, *ticker_);
}

// A forked child has neither the threads nor the connections.
Across::~Across() {
  if (!transport().forked()) return;
  (void)speaker_.release();
  (void)ticker_.release();
  for (Pages& pages : pages_) (void)new Pages(std::move(pages));
  (void)new Wires(std::move(wires_));
}

void Across::leave() {
  if (transport().forked()) return;
  if (wires_.after) wires_.after->leave();
  if (speaker_) speaker_->leave();
  inside_->close();
}

bool Across::on_own_thread() const { return inside_->on_own_thread() || ticker_->is_this_thread(); }

void Across::run(const Op& op, const WaitScope& scope) {
  board_.note_arrival(rank_, scope.op.sequence);
  Operation operation(*this, op, scope);
  Agreement agreement(operation);
  run_kind(operation, agreement);
  board_.note_finished(rank_, scope.op.sequence);
  transport().idle();  // settles messages that came meanwhile, where the worker is held up
}

std::byte* Across::memory(size_t nbytes) {
  if (nbytes > memory_bytes_) {
    memory_.reset();
    memory_ = std::make_unique_for_overwrite<std::byte[]>(nbytes);
    memory_bytes_ = nbytes;
  }
  return memory_.get();
}

void Across::await(Ticket& ticket, int peer, const WaitScope& scope) {
  const Ticker::Watched watched(*ticker_, ticket);
  Clock::time_point closed{};
  for (;;) {
    try {
      if (ticket.wait()) return;
    } catch (const WireError& error) {
      lost(peer, error, scope);
    }
    look(peer, closed, scope);
  }
}

// At what ends a wait for the wire.
void Across::look(int peer, Clock::time_point& closed, const WaitScope& scope) {
  transport().beat();
  transport().idle();  // messages go on
  transport().check(scope.op);
  if (interrupted()) {
    transport().abort(interrupted_text);
    transport().check(scope.op);
  }
  look_at_leader(scope);
  const auto now = Clock::now();
  // One that has finished this operation has sent all of it, however long that takes to arrive.
  if (board_.closed(peer) && board_.finished(peer) < scope.op.sequence) {
    if (closed == Clock::time_point{}) closed = now;
    if (now - closed > until_reason) fail_closed(peer, scope);
  }
  if (now >= scope.deadline) board_.note_overdue(scope.op, scope.timeout);
  if (now < scope.deadline + grace) return;  // the speakers find out who is missing: speaker.h
  std::ostringstream text;
  text << placement_.name(peer) << " did not arrive within the timeout of " << scope.timeout << " s";
  fail(ErrorKind::timeout, peer, text.str(), scope);
}

bool Across::closed(int rank) const {
  const int here = local(rank);
  return here < 0 ? board_.closed(rank) : transport().peer_closed(here);
}

void Across::look_at_lives(const OpInfo& op) {
  transport().check(op);
  look_at_leader({op, Clock::now(), 0});
}

bool Across::leader_died() const {
  if (leads() || transport().peer_closed(0) || transport().peer_alive(0)) return false;
  return !transport().peer_closed(0);  // it may have said so since, and then ended
}

// What other hosts say of a stopped leader goes to that leader alone, and it holds its lock: so its host
// looks at the pulse that its speaker leaves on the board. Silence counts only while this thread runs.
void Across::look_at_pulse() {
  const auto now = Clock::now();
  if (now - std::exchange(pulse_looked_at_, now) > longest_pause) pulse_seen_ = now;
  pulse_seen_ = std::max(pulse_seen_, board_.pulse());
  const auto patience = std::chrono::duration<double>(transport().host_timeout());
  if (now - pulse_seen_ < patience || transport().broken()) return;
  if (transport().peer_closed(0) || !transport().peer_alive(0)) return;
  const int leader = placement_.ranks[host_][0];
  std::ostringstream text;
  text << placement_.name(leader) << ", which speaks for " << placement_.names[host_]
       << ", has not been heard for " << transport().host_timeout() << " s: it is stopped";
  transport().mark_broken({ErrorKind::peer, {}, leader, text.str()});
}

// It looks at the lives of the others (speaker.h), and nobody else at its own while all wait for the wire.
void Across::look_at_leader(const WaitScope& scope) {
  if (!leader_died()) return;
  const int leader = placement_.ranks[host_][0];
  fail(ErrorKind::peer, leader, placement_.name(leader) + " died (its process ended)", scope);
}

void Across::lost(int peer, const WireError& error, const WaitScope& scope) {
  for (const auto limit = Clock::now() + until_reason; Clock::now() < limit;) {
    transport().check(scope.op);
    if (board_.closed(peer)) fail_closed(peer, scope);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  fail(ErrorKind::peer, peer,
       "the connection to " + placement_.name(peer) + " ended: it died or closed the group (" + error.what() +
           ")",
       scope);
}

void Across::blame(const OpInfo& op, double late) {
  board_.note_overdue(op, late);
  for (const auto limit = Clock::now() + grace; Clock::now() < limit;) {
    transport().check(op);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Across::fail_closed(int peer, const WaitScope& scope) {
  fail(ErrorKind::peer, peer, placement_.name(peer) + " closed the group before it came to this operation",
       scope);
}

void Across::fail(ErrorKind kind, int peer, const std::string& text, const WaitScope& scope) {
  transport().mark_broken({kind, scope.op, peer, text + " (seen by " + placement_.name(rank_) + ")"});
  transport().check(scope.op);
  throw CommError(kind, transport().where(scope.op) + text, rank_, placement_.world_size(), scope.op, peer);
}

}  // namespace pycomm
