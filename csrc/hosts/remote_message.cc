// remote_message.cc -- see remote_message.h.
#include "remote_message.h"

#include <algorithm>
#include <tuple>

#include "messages.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto poll_look_every = std::chrono::milliseconds(10);

}  // namespace

RemoteMessage::RemoteMessage(AcrossMessages& owner, OpKind kind, std::byte* data, const MessageSpec& spec,
                             std::function<void()> finalizer)
    : owner_(owner),
      kind_(kind),
      spec_(spec),
      nbytes_(spec.nbytes()),
      data_(data),
      peer_(spec.peer),
      traced_(owner.communicator(), kind, nbytes_) {
  finalizer_ = std::move(finalizer);
  traced_.issued();
}

void RemoteMessage::wait(double timeout) {
  if (!done()) traced_.wait_begins();
  WaitScope limit = scope(timeout);
  limit.deadline += Clock::now() - issued_;
  owner_.wait(*this, limit);
  if (error()) std::rethrow_exception(error());
}

bool RemoteMessage::poll() {
  if (done()) return true;
  owner_.progress();
  const auto now = Clock::now();
  if (!done() && now >= next_look_) {
    next_look_ = now + poll_look_every;
    owner_.look(*this);
  }
  return done();
}

void RemoteMessage::help(bool nobody_waits) {
  if (!done()) owner_.help(*this, nobody_waits);
}

WaitScope RemoteMessage::scope(double timeout) const {
  const double limit = timeout > 0         ? timeout
                       : spec_.timeout > 0 ? spec_.timeout
                                           : owner_.transport().timeout();
  WaitScope scope = scope_of(info(), limit);
  scope.deadline += issued_ - Clock::now();
  scope.any_peer = from_any();
  return scope;
}

RemotePtr Mailbox::take(int src, int tag) {
  for (;;) {
    const auto found =
        std::find_if(recvs_.begin(), recvs_.end(), [&](const RemotePtr& m) { return m->wants(src, tag); });
    if (found == recvs_.end()) return nullptr;
    RemotePtr recv = *found;
    recvs_.erase(found);
    if (!recv->claim()) continue;  // a message of this host was faster
    recv->matched(src);
    return recv;
  }
}

void Mailbox::forget(const RemotePtr& recv) {
  const auto found = std::find(recvs_.begin(), recvs_.end(), recv);
  if (found != recvs_.end()) recvs_.erase(found);
}

void Mailbox::give_up(const std::exception_ptr& error) {
  for (RemotePtr& recv : std::exchange(recvs_, {}))
    if (recv->claim()) end(std::move(recv), error);
}

void Mailbox::give(RemoteMessage& message) {
  if (message.over() || std::exchange(message.given, true)) return;
  num_given_.fetch_add(1, std::memory_order_relaxed);
}

void Mailbox::end(RemotePtr message, std::exception_ptr error) {
  message->note_over();
  ended_.emplace_back(std::move(message), std::move(error));
  num_ended_.fetch_add(1, std::memory_order_release);
}

void Mailbox::note_over(RemoteMessage& message) {
  message.note_over();
  if (message.given) num_given_.fetch_sub(1, std::memory_order_relaxed);
}

bool Mailbox::take_ended(RemotePtr& message, std::exception_ptr& error) {
  if (ended_.empty()) return false;
  std::tie(message, error) = std::move(ended_.front());
  ended_.pop_front();
  num_ended_.fetch_sub(1, std::memory_order_relaxed);
  if (message->given) num_given_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

void Mailbox::wake() {
  transport_.notify(transport_.rank());
  if (given() > 0) transport_.ring_helper(transport_.rank());
}

}  // namespace pycomm
