// message.cc -- see message.h.
#include "message.h"

#include <algorithm>
#include <tuple>

#include "send_recv.h"

namespace pycomm {

namespace {

constexpr auto poll_look_every = std::chrono::milliseconds(10);

}  // namespace

Message::Message(SendRecv& owner, OpKind kind, std::byte* data, const MessageSpec& spec,
                 std::function<void()> finalizer)
    : owner_(owner),
      kind_(kind),
      spec_(spec),
      nbytes_(spec.nbytes()),
      data_(data),
      peer_(spec.peer),
      traced_(owner.communicator(), kind, nbytes_) {
  finalizer_ = std::move(finalizer);
  if (told()) traced_.issued();
}

void Message::end(std::exception_ptr error) {
  const int peer = peer_;
  if (told()) traced_.ended(id_, peer < 0 ? peer : owner_.transport().number(peer), error != nullptr);
  settle(std::move(error));
}

void Message::wait(double timeout) {
  if (!done()) {
    traced_.wait_begins();
    WaitScope limit = scope(timeout);
    limit.deadline += std::chrono::steady_clock::now() - issued_;
    owner_.wait(*this, limit);
  }
  if (error()) std::rethrow_exception(error());
}

int Message::source() const { return owner_.transport().number(peer_); }

bool Message::poll() {
  if (done()) return true;
  owner_.progress();
  const auto now = std::chrono::steady_clock::now();
  if (!done() && now >= next_look_) {
    next_look_ = now + poll_look_every;
    owner_.urge(*this);
    owner_.look(*this);
  }
  return done();
}

void Message::help(bool nobody_waits) {
  if (done() || helped_) return;
  helped_ = nobody_waits;
  owner_.help(*this, nobody_waits);
}

WaitScope Message::scope(double timeout) const {
  WaitScope scope;
  scope.op = info();
  scope.any_peer = from_any();
  scope.timeout = timeout > 0 ? timeout : spec_.timeout > 0 ? spec_.timeout : owner_.transport().timeout();
  scope.deadline = issued_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                 std::chrono::duration<double>(std::min(scope.timeout, 1e8)));
  return scope;
}

void Tally::entrust(Message& message, Trust trust) {
  auto count = [this](Trust trust, int n) {
    if (trust == Trust::lent) add(lent, n);
    if (trust == Trust::given) add(given, n);
  };
  count(message.trust(), -1);
  count(trust, 1);
  message.entrust(trust);
}

void Tally::end(MessagePtr message, std::exception_ptr error) {
  entrust(*message, Trust::over);
  ended_.emplace_back(std::move(message), std::move(error));
}

bool Tally::take(MessagePtr& message, std::exception_ptr& error) {
  if (ended_.empty()) return false;
  std::tie(message, error) = std::move(ended_.front());
  ended_.pop_front();
  add(active, -1);
  return true;
}

std::exception_ptr Tally::take_deferred_error() {
  if (deferred_errors_.empty()) return nullptr;
  std::exception_ptr error = std::move(deferred_errors_.front());
  deferred_errors_.pop_front();
  return error;
}

std::exception_ptr mismatch(const Transport& transport, OpKind kind, const MessageSpec& mine, int peer,
                            const Other& other, const char* more) {
  try {
    transport.raise(ErrorKind::mismatch, {kind, 0}, peer,
                    difference(mine, transport.name(peer), other.count, other.dtype) + more);
  } catch (...) {
    return std::current_exception();
  }
}

std::string difference(const MessageSpec& spec, const std::string& name, size_t count, DType dtype) {
  std::string what = spec.dtype != dtype
                         ? std::string("dtype=") + to_string(spec.dtype) + " here, " + to_string(dtype)
                         : "count=" + std::to_string(spec.count) + " here, " + std::to_string(count);
  return what + " on " + name + " (tag " + std::to_string(spec.tag) +
         "). A recv must have the count and dtype of its send.";
}

}  // namespace pycomm
