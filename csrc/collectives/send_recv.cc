// send_recv.cc -- see send_recv.h.
#include "send_recv.h"

#include <stdexcept>
#include <thread>

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

// Longer than a peer needs that is about to call, shorter than anybody's patience.
constexpr auto before_urging = std::chrono::microseconds(50);
constexpr auto before_urging_oversubscribed = std::chrono::microseconds(500);  // it may wait for a core
constexpr auto between_urges = std::chrono::milliseconds(1);
constexpr int looks_per_clock = 8;
constexpr auto look_every = std::chrono::milliseconds(10);

// What a message waits for: `ready` looks at once, `surely` may wait for the lock (transport/wait.h).
template <class Ready, class Surely>
struct Until {
  const Ready& ready;
  const Surely& surely_ready;
  bool operator()(int) const { return ready(); }
  bool surely(int) const { return surely_ready(); }
};
template <class Ready, class Surely>
Until(const Ready&, const Surely&) -> Until<Ready, Surely>;

}  // namespace

SendRecv::SendRecv(Communicator& comm)
    : comm_(comm),
      transport_(comm.transport()),
      deferred_errors_(transport_.control(comm.rank()).deferred_errors),
      attending_(transport_.control(comm.rank()).attending) {
  for (int p = 0; p < comm.world_size(); ++p) {
    out_.emplace_back(transport_, p, tally_);
    in_.emplace_back(comm, p, recvs_, tally_);
  }
}

MessagePtr SendRecv::make(OpKind kind, std::byte* data, const MessageSpec& spec,
                          std::function<void()> finalizer) {
  const OpInfo info{kind, 0};
  refuse_bad_peer(comm_, kind, spec.peer);
  if (!spec.claim) raise_deferred_error();  // else it is a part of a call that has begun (hosts/messages.h)
  transport_.check(info);
  transport_.note_core();
  return std::make_shared<Message>(*this, kind, data, spec, std::move(finalizer));
}

MessagePtr SendRecv::start_send(const std::byte* data, const MessageSpec& spec,
                                std::function<void()> finalizer) {
  MessagePtr message = make(OpKind::send, const_cast<std::byte*>(data), spec, std::move(finalizer));
  std::unique_lock lock(mutex_);
  try {
    out_[spec.peer].add(message);
    tally_.begin();
    out_[spec.peer].push();
  } catch (...) {
    lock.unlock();
    fail_after(std::current_exception());
    return message;
  }
  settle(lock);  // it may be over
  return message;
}

MessagePtr SendRecv::start_recv(std::byte* data, const MessageSpec& spec, std::function<void()> finalizer) {
  MessagePtr message = make(OpKind::recv, data, spec, std::move(finalizer));
  {
    std::lock_guard lock(mutex_);
    recvs_.add(message);
    tally_.begin();
  }
  progress();
  return message;
}

void SendRecv::withdraw(Message& recv) {
  std::unique_lock lock(mutex_);
  recvs_.drop(recv, tally_);
  settle(lock);
}

void SendRecv::help(Message& message, bool nobody_waits) {
  {
    std::lock_guard lock(mutex_);
    if (message.trust() == Trust::over) return;
    if (message.sends() && message.passive() && !nobody_waits) return;  // its receiver completes it
    const bool given = nobody_waits || message.sends() || message.trust() == Trust::given;
    tally_.entrust(message, given ? Trust::given : Trust::lent);
    if (nobody_waits && !message.spec().claim) unattended_.push_back(message.weak_from_this());
  }
  comm_.lend_worker(nobody_waits);
  // What came since it was issued, while another caller attended, has called nobody.
  if (!message.sends()) progress(std::unique_lock(mutex_));
  if (given()) transport_.ring_helper(comm_.rank());
}

void SendRecv::urge(const Message& message) {
  const int peer = message.peer();
  for (int p = 0; p < comm_.world_size(); ++p)
    if (p != comm_.rank() && (peer == any_source || p == peer)) transport_.ring_helper(p);
}

void SendRecv::wait(Message& message, const WaitScope& scope) {
  if (transport_.forked()) transport_.check({});  // before any lock, which may have been copied locked
  const Attending attending(*this);
  const bool oversubscribed = transport_.oversubscribed();
  const auto patience = oversubscribed ? before_urging_oversubscribed : before_urging;
  int looks = 0;
  auto urge_at = Clock::time_point::max();
  auto ready = [&] {
    if (message.done()) return true;
    const bool moved = progress();
    if (message.done()) return true;
    if (++looks % looks_per_clock == 0 || oversubscribed) {
      const auto now = Clock::now();
      if (now >= urge_at) urge(message);
      if (moved || looks <= looks_per_clock) urge_at = now + patience;
      else if (now >= urge_at) urge_at = now + between_urges;
    }
    return false;
  };
  auto surely = [&] { return over(message); };
  // Once a recv from any source has its message, it is the death of that sender that matters.
  auto matched = [&] { return ready() || message.peer() != any_source; };
  auto surely_matched = [&] { return surely() || message.peer() != any_source; };
  try {
    if (message.peer() == any_source) transport_.wait_all(Until{matched, surely_matched}, scope);
    WaitScope from_one = scope;
    from_one.any_peer = false;
    if (!message.done()) transport_.wait_for(message.peer(), Until{ready, surely}, from_one);
  } catch (const CommError&) {
    fail_all(std::current_exception());
  }
  // Another thread may have it in hand, between its end and its settling.
  while (!message.done()) {
    std::unique_lock lock(mutex_);
    if (!settle(lock)) std::this_thread::yield();
  }
}

// See [Note: who moves a message].
SendRecv::Attending::~Attending() {
  if (messages.attending_.fetch_sub(1, std::memory_order_relaxed) != 1) return;
  if (messages.tally_.active.load(std::memory_order_relaxed) > 0) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    messages.progress(std::unique_lock(messages.mutex_));
  }
  if (messages.given())
    messages.transport_.ring_helper(messages.comm_.rank());  // it may sleep as one whose
                                                             // caller waits
}

void SendRecv::look(Message& message) {
  const int peer = message.peer();
  const bool any = peer == any_source;
  WaitScope scope = message.scope(0);
  scope.any_peer = any;
  auto done = [&] { return message.done(); };
  auto surely = [&] { return over(message); };
  try {
    transport_.look(any ? 0 : peer, any ? comm_.world_size() : peer + 1, Until{done, surely}, scope);
  } catch (const CommError&) {
    fail_all(std::current_exception());
  }
}

// By the worker.
void SendRecv::look_at_peers() {
  const auto now = Clock::now();
  if (!given() || now < next_look_) return;
  next_look_ = now + look_every;
  std::vector<MessagePtr> unfinished;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(unattended_, [&](const std::weak_ptr<Message>& each) {
      MessagePtr message = each.lock();
      if (!message || message->trust() == Trust::over) return true;
      unfinished.push_back(std::move(message));
      return false;
    });
  }
  for (const MessagePtr& message : unfinished) look(*message);
}

// Whether it has ended, settled or not, with all that its peer had done before this call.
bool SendRecv::over(Message& message) {
  progress(std::unique_lock(mutex_));
  std::lock_guard lock(mutex_);
  return message.trust() == Trust::over;
}

bool SendRecv::progress() {
  if (transport_.forked()) return false;
  if (tally_.active.load(std::memory_order_relaxed) == 0 && !owes()) return false;
  std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && progress(std::move(lock));
}

bool SendRecv::progress(std::unique_lock<std::mutex> lock) {
  const bool was_keen = keen();
  bool moved = false;
  try {
    moved = advance();
  } catch (...) {
    lock.unlock();
    fail_after(std::current_exception());
    return true;
  }
  const bool now_keen = !was_keen && keen();
  moved |= settle(lock);
  if (now_keen) transport_.ring_helper(comm_.rank());
  return moved;
}

bool SendRecv::advance() {
  if (transport_.broken()) transport_.check({OpKind::none, 0});
  bool moved = false;
  for (int p = 0; p < comm_.world_size(); ++p) {
    if (p == comm_.rank()) continue;
    moved |= out_[p].push();
    moved |= in_[p].pull();
  }
  return moved;
}

// See [Note: settling]. Called with the lock held, returns without it.
bool SendRecv::settle(std::unique_lock<std::mutex>& lock) {
  MessagePtr message;
  std::exception_ptr error;
  bool any = false;
  while (tally_.take(message, error)) {
    lock.unlock();
    message->end(std::exchange(error, nullptr));
    message.reset();
    any = true;
    lock.lock();
  }
  lock.unlock();
  return any;
}

// Where something else than the group has failed here (memory), a message may have moved in part, and no
// later one can be told from its rest: the group ends.
void SendRecv::fail_after(std::exception_ptr error) {
  if (!transport_.broken()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      transport_.abort(std::string("its messages failed: ") + e.what());
    }
  }
  fail_all(std::move(error));
}

void SendRecv::raise_deferred_error() {
  if (deferred_errors_.load(std::memory_order_acquire) == raised_.load(std::memory_order_relaxed)) return;
  if (held_by_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
  if (transport_.forked()) return;  // before any lock; whatever was called refuses that
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    for (int p = 0; p < comm_.world_size(); ++p)
      if (p != comm_.rank()) out_[p].take_acknowledgements();
    error = tally_.take_deferred_error();
    if (error) raised_.fetch_add(1, std::memory_order_relaxed);
  }
  if (error) std::rethrow_exception(error);
}

std::vector<std::string> SendRecv::unreceived() {
  std::vector<std::string> found;
  if (transport_.forked() || transport_.closed() || transport_.broken()) return found;
  progress(std::unique_lock(mutex_));  // what has a recv is received
  std::lock_guard lock(mutex_);
  for (int p = 0; p < comm_.world_size(); ++p) {
    if (p == comm_.rank()) continue;
    for (std::string each : {in_[p].unreceived(), out_[p].unreceived()})
      if (!each.empty()) found.push_back(std::move(each));
  }
  return found;
}

void SendRecv::fail_all(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  for (Outgoing& out : out_) out.give_up(error);
  for (Incoming& in : in_) in.give_up(error);
  recvs_.give_up(tally_, error);
  settle(lock);
}

}  // namespace pycomm
