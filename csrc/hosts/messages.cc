// messages.cc -- see messages.h.
#include "messages.h"

#include <sstream>

#include "../transport/interrupt.h"

namespace pycomm {

namespace {

constexpr double tick = 0.02;  // seconds between looks at what could end a wait
constexpr auto look_every = std::chrono::milliseconds(10);
constexpr auto until_reason = std::chrono::seconds(1);  // for whoever knows better to say it
constexpr auto longest_farewell = std::chrono::seconds(1);

std::string names(const Placement& placement, const std::vector<int>& ranks) {
  if (ranks.size() == 1) return placement.name(ranks[0]);
  std::string text = "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

AcrossMessages::AcrossMessages(Communicator& comm, Across& across)
    : comm_(comm),
      across_(across),
      inside_(across.shared_inside()),
      state_(new State{Mailbox(across.transport()), {}, {}, {}, {}}) {
  const Placement& placement = across.placement();
  for (int p = 0; p < placement.world_size(); ++p)
    state_->links.push_back(
        placement.host_of[p] == across.host() ? nullptr : std::make_unique<Link>(across, mailbox(), p));
}

AcrossMessages::~AcrossMessages() {
  if (inside_->transport().forked()) (void)state_.release();
}

// --- sending and receiving

RemotePtr AcrossMessages::make(OpKind kind, std::byte* data, const MessageSpec& spec,
                               std::function<void()> finalizer) {
  MessageSpec own = spec;
  if (spec.peer == any_source) own.claim = std::make_shared<Claim>();
  return std::make_shared<RemoteMessage>(*this, kind, data, own, std::move(finalizer));
}

// With the lock held.
void AcrossMessages::refuse_ended() const {
  if (state_->error) std::rethrow_exception(state_->error);
}

MessageWorkPtr AcrossMessages::send(const std::byte* data, const MessageSpec& spec,
                                    std::function<void()> finalizer) {
  refuse_bad_peer(comm_, OpKind::send, spec.peer);
  raise_deferred_error();
  transport().check({OpKind::send, 0});
  if (const int here = across_.local(spec.peer); here >= 0) {
    MessageSpec inner = spec;
    inner.peer = here;
    return local().send(data, inner, std::move(finalizer));
  }
  RemotePtr message = make(OpKind::send, const_cast<std::byte*>(data), spec, std::move(finalizer));
  std::lock_guard lock(mailbox().mutex);
  refuse_ended();
  state_->links[spec.peer]->send(message);
  return message;
}

MessageWorkPtr AcrossMessages::recv(std::byte* data, const MessageSpec& spec,
                                    std::function<void()> finalizer) {
  refuse_bad_peer(comm_, OpKind::recv, spec.peer);
  raise_deferred_error();
  transport().check({OpKind::recv, 0});
  if (const int here = spec.peer == any_source ? -1 : across_.local(spec.peer); here >= 0) {
    MessageSpec inner = spec;
    inner.peer = here;
    return local().recv(data, inner, std::move(finalizer));
  }
  RemotePtr message = make(OpKind::recv, data, spec, std::move(finalizer));
  bool matched = false;
  {
    std::lock_guard lock(mailbox().mutex);
    refuse_ended();
    for (int p = 0; p < comm_.world_size(); ++p)
      if (state_->links[p] && (spec.peer == p || spec.peer == any_source)) state_->links[p]->start();
    for (int p = 0; p < comm_.world_size() && !matched; ++p)
      if (state_->links[p] && (spec.peer == p || spec.peer == any_source))
        matched = state_->links[p]->offer(message);
    if (!matched) mailbox().add(message);
  }
  if (!matched && message->from_any() && inside_->world_size() > 1) start_half(message);
  progress();
  return message;
}

// See [Note: one winner].
void AcrossMessages::start_half(const RemotePtr& message) {
  MessagePtr half;
  try {
    half = local().start_recv(message->data(), message->spec(), {});
  } catch (...) {
    std::lock_guard lock(mailbox().mutex);
    mailbox().forget(message);
    throw;
  }
  {
    std::lock_guard lock(mailbox().mutex);
    message->set_half(half);
  }
  half->on_completion([this, message, half = half.get()] { end_half(message, *half); });
  if (message->spec().claim->by() == Claim::By::wire) local().withdraw(*half);  // meanwhile
}

// The part of a recv from any source among this host's has ended: it has a message, has failed, or the wire
// was faster.
void AcrossMessages::end_half(const RemotePtr& message, const Message& half) {
  Claim& claim = *message->spec().claim;
  claim.take(Claim::By::host);
  if (claim.by() == Claim::By::wire) return;
  {
    std::lock_guard lock(mailbox().mutex);
    mailbox().forget(message);
    mailbox().note_over(*message);
    if (half.peer() != any_source) message->matched(half.source());
  }
  message->end(half.error());
  mailbox().wake();
}

bool AcrossMessages::progress() {
  if (transport().forked()) return false;
  const bool moved = local().progress();
  return settle() || moved;
}

// Without the lock; what it calls may come back here.
bool AcrossMessages::settle() {
  bool any = false;
  while (mailbox().ended() > 0) {
    RemotePtr message;
    std::exception_ptr error;
    MessagePtr half;
    {
      std::lock_guard lock(mailbox().mutex);
      if (!mailbox().take_ended(message, error)) break;
      half = message->half();
    }
    if (half) local().withdraw(*half);
    message->end(std::exchange(error, nullptr));
    any = true;
  }
  if (any) mailbox().wake();  // somebody else may wait for one of them
  return any;
}

void AcrossMessages::help(RemoteMessage& message, bool nobody_waits) {
  if (transport().forked()) return;
  MessagePtr half;
  {
    std::lock_guard lock(mailbox().mutex);
    half = message.half();
    if (nobody_waits && !message.over()) {
      mailbox().give(message);
      state_->unattended.push_back(message.weak_from_this());
    }
  }
  if (half) half->help(nobody_waits);
  if (!nobody_waits) return;
  comm_.lend_worker(true);
  transport().ring_helper(transport().rank());
}

// --- waiting

void AcrossMessages::wait(RemoteMessage& message, const WaitScope& scope) {
  if (transport().forked()) transport().check({});
  const SendRecv::Attending attending(local());
  const MessagePtr half = message.half();
  auto next_look = Clock::now() + look_every;
  try {
    for (;;) {
      const bool moved = progress();
      if (message.done()) return;
      if (half && !moved) local().urge(*half);
      if (interrupted()) transport().abort(interrupted_text);
      const auto now = Clock::now();
      if (now >= next_look || transport().broken() || transport().closed()) {
        examine(message, scope);
        next_look = now + look_every;
      }
      if (moved) continue;
      transport().sleep_unless(
          [&] { return message.done() || mailbox().ended() > 0 || transport().broken(); }, tick);
    }
  } catch (const CommError&) {
    fail_all(std::current_exception());
  }
  while (!message.done())  // another thread may have it in hand
    if (!settle()) std::this_thread::yield();
}

void AcrossMessages::look(RemoteMessage& message) {
  try {
    examine(message, message.scope(0));
  } catch (const CommError&) {
    fail_all(std::current_exception());
  }
}

// By the worker.
void AcrossMessages::look_at_peers() {
  const auto now = Clock::now();
  if (mailbox().given() == 0 || now < next_look_) return;
  next_look_ = now + look_every;
  std::vector<RemotePtr> unfinished;
  {
    std::lock_guard lock(mailbox().mutex);
    std::erase_if(state_->unattended, [&](const std::weak_ptr<RemoteMessage>& each) {
      RemotePtr message = each.lock();
      if (!message || message->over()) return true;
      unfinished.push_back(std::move(message));
      return false;
    });
  }
  for (const RemotePtr& message : unfinished) look(*message);
}

// Throws what ends the wait for a message that cannot come any more, or not in time.
void AcrossMessages::examine(RemoteMessage& message, const WaitScope& scope) {
  transport().beat();
  transport().check(scope.op);
  int peer = message.source();
  if (const MessagePtr& half = message.half(); half && half->peer() != any_source) peer = half->source();
  std::vector<int> missing;
  int gone = -1;
  for (int p = 0; p < comm_.world_size(); ++p) {
    if (p == comm_.rank() || (peer != any_source && p != peer)) continue;
    const Standing now = standing(p);
    if (now == Standing::here) missing.push_back(p);
    else gone = p;
    if (now == Standing::died || now == Standing::lost) {
      missing.clear();
      break;
    }
  }
  // Without its leader this host hears no other's words, and whoever is to send may have stopped for them.
  const bool late = Clock::now() >= scope.deadline, leaderless = across_.leader_died();
  if (!missing.empty() && !late && !leaderless) return;
  // [Note: the last look], transport/wait.h: what it had done before counts.
  progress();
  if (message.over() || (peer == any_source && message.spec().claim->by() != Claim::By::nobody)) return;
  if (missing.empty()) fail(standing(gone), gone, scope);
  if (leaderless) across_.look_at_lives(scope.op);
  fail_late(missing, scope);
}

AcrossMessages::Standing AcrossMessages::standing(int rank) {
  if (const int here = across_.local(rank); here >= 0) {
    if (transport().peer_closed(here)) return Standing::closed;
    if (transport().peer_alive(here)) return Standing::here;
    return transport().peer_closed(here) ? Standing::closed : Standing::died;
  }
  Link& link = *state_->links[rank];
  if (link.left()) return Standing::closed;
  std::lock_guard lock(mailbox().mutex);
  const auto now = Clock::now();
  Clock::time_point since;
  std::string why;
  const bool lost = link.lost(since, why);
  if (across_.board().closed(rank)) {
    if (link.closed_seen == Clock::time_point{}) link.closed_seen = now;
    if (lost || now - link.closed_seen > until_reason) return Standing::closed;
  }
  return lost && now - since > until_reason ? Standing::lost : Standing::here;
}

void AcrossMessages::fail(Standing standing, int rank, const WaitScope& scope) {
  const std::string name = across_.placement().name(rank);
  Clock::time_point since;
  std::string text = name + " closed the group before it came to this operation", why;
  if (standing == Standing::died) text = name + " died (its process ended)";
  if (standing == Standing::lost) {
    std::lock_guard lock(mailbox().mutex);
    state_->links[rank]->lost(since, why);
    text = "the connection to " + name + " ended: it died or closed the group (" + why + ")";
  }
  across_.fail(ErrorKind::peer, rank, text, scope);
}

void AcrossMessages::fail_late(const std::vector<int>& missing, const WaitScope& scope) {
  std::ostringstream text;
  text << names(across_.placement(), missing) << " did not arrive within the timeout of " << scope.timeout
       << " s";
  across_.fail(ErrorKind::timeout, missing[0], text.str(), scope);
}

// --- the end

void AcrossMessages::fail_all(std::exception_ptr error) {
  if (transport().forked()) return;
  local().fail_all(error);
  give_up(error);
  settle();
}

// Buffers are their owners' again when their messages end: the tickets go first, and before them whoever
// waits for them.
void AcrossMessages::give_up(const std::exception_ptr& error) {
  std::lock_guard one_at_a_time(state_->ending);
  {
    std::lock_guard lock(mailbox().mutex);
    if (!state_->error) state_->error = error;
  }
  for (auto& link : state_->links)
    if (link) link->stop();
  std::lock_guard lock(mailbox().mutex);
  for (auto& link : state_->links)
    if (link) link->give_up(error);
  mailbox().give_up(error);
}

void AcrossMessages::leave() {
  if (transport().forked() || transport().closed() || transport().broken()) return;
  {
    std::lock_guard lock(mailbox().mutex);
    for (auto& link : state_->links)
      if (link) link->say_farewell();
  }
  const auto limit = Clock::now() + longest_farewell;
  for (auto& link : state_->links)
    if (link) link->await_farewell(limit);
}

bool AcrossMessages::on_own_thread() const {
  for (const auto& link : state_->links)
    if (link && link->is_this_thread()) return true;
  return false;
}

}  // namespace pycomm
