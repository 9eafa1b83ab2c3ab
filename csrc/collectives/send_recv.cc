// send_recv.cc -- see send_recv.h.
#include "send_recv.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace pycomm {

namespace {

constexpr auto poll_look_every = std::chrono::milliseconds(10);
constexpr size_t worth_the_worker = 64 << 10;   // smaller recvs are left to wait(): waking a thread costs more than the copy
constexpr size_t kernel_from = message_inline_bytes + 1;  // one copy by the kernel beats two through the ring, see select.cc
constexpr size_t kernel_until = 64 << 20;

}  // namespace

void Message::wait(double timeout) { engine_->wait(*this, timeout); }
bool Message::poll() {
  if (!done()) engine_->poll(*this);
  return done();
}
void Message::help(bool nobody_waits) { engine_->help(*this, nobody_waits); }

PointToPoint::PointToPoint(Communicator& comm)
    : comm_(comm), transport_(comm.transport()), out_(comm.world_size()), in_(comm.world_size()) {}

MessagePtr PointToPoint::make(bool sending, std::byte* data, size_t count, DType dtype, int peer, int tag, double timeout,
                              std::function<void()> finalizer) {
  const OpInfo info{sending ? OpKind::send : OpKind::recv, 0};
  if (peer == comm_.rank() || peer < (sending ? 0 : any_source) || peer >= comm_.world_size())
    throw std::invalid_argument(transport_.where(info) + "peer rank " + std::to_string(peer) +
                                " must be another rank of the group, in [0, " + std::to_string(comm_.world_size()) + ")");
  transport_.check(info);
  transport_.note_core();
  auto message = std::make_shared<Message>();
  message->engine_ = this;
  message->sending_ = sending;
  message->asked_ = message->peer_ = peer;
  message->tag_ = tag;
  message->dtype_ = dtype;
  message->count_ = count;
  message->nbytes_ = count * size_of(dtype);
  message->data_ = data;
  message->timeout_ = timeout;
  message->finalizer_ = std::move(finalizer);
  return message;
}

MessagePtr PointToPoint::send(const std::byte* data, size_t count, DType dtype, int dst, int tag, double timeout,
                              std::function<void()> finalizer) {
  MessagePtr message = make(true, const_cast<std::byte*>(data), count, dtype, dst, tag, timeout, std::move(finalizer));
  active_.fetch_add(1, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    out_[dst].waiting.push_back(message);
    push(dst);
  }
  return message;
}

MessagePtr PointToPoint::recv(std::byte* data, size_t count, DType dtype, int src, int tag, double timeout,
                              std::function<void()> finalizer) {
  MessagePtr message = make(false, data, count, dtype, src, tag, timeout, std::move(finalizer));
  active_.fetch_add(1, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    recvs_.push_back(message);
  }
  progress();
  return message;
}

void PointToPoint::help(Message& message, bool nobody_waits) {
  if (message.done() || message.helped_) return;
  if (!nobody_waits && (message.sending_ ? message.passive_.load() : message.nbytes_ < worth_the_worker)) return;
  message.helped_ = true;
  helped_.fetch_add(1);
  message.on_completion([this] { helped_.fetch_sub(1); });
  comm_.wake_worker();
}

void PointToPoint::wait(Message& message, double timeout) {
  if (transport_.forked()) transport_.check({});  // before any lock, which may have been copied locked
  auto ready = [&](int) {
    if (!message.done()) progress();
    return message.done();
  };
  WaitScope scope = scope_of(message, timeout);
  scope.deadline += std::chrono::steady_clock::now() - message.issued_;
  try {
    if (message.peer_ == any_source) transport_.wait_all(ready, scope);
    else transport_.wait_for(message.asked_, ready, scope);
  } catch (const CommError&) {
    fail_all(std::current_exception());
  }
  if (message.error()) std::rethrow_exception(message.error());
}

// Times count from the issue of the message.
WaitScope PointToPoint::scope_of(const Message& message, double timeout) const {
  WaitScope scope;
  scope.op = {message.sending_ ? OpKind::send : OpKind::recv, 0};
  scope.any_peer = message.asked_ == any_source;
  scope.timeout = timeout > 0 ? timeout : message.timeout_ > 0 ? message.timeout_ : transport_.timeout();
  scope.deadline = message.issued_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                         std::chrono::duration<double>(std::min(scope.timeout, 1e8)));
  return scope;
}

void PointToPoint::poll(Message& message) {
  progress();
  const auto now = std::chrono::steady_clock::now();
  if (message.done() || now < message.next_look_) return;
  message.next_look_ = now + poll_look_every;
  const bool any = message.asked_ == any_source;
  try {
    transport_.look(
        any ? 0 : message.asked_, any ? comm_.world_size() : message.asked_ + 1, [&](int) { return message.done(); }, scope_of(message, 0));
  } catch (const CommError&) {
    fail_all(std::current_exception());
  }
}

bool PointToPoint::progress() {
  if (transport_.forked()) return false;
  if (active_.load(std::memory_order_relaxed) == 0 && !owes()) return false;
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  bool moved = false;
  try {
    moved = advance();
  } catch (...) {
    lock.unlock();
    fail_all(std::current_exception());
    return true;
  }
  auto finished = std::move(finished_);
  finished_.clear();
  lock.unlock();
  for (auto& [message, error] : finished) {
    active_.fetch_sub(1, std::memory_order_relaxed);  // only now: what is finished and not settled still needs progress()
    message->settle(error);
  }
  return moved || !finished.empty();
}

bool PointToPoint::advance() {
  if (transport_.broken()) transport_.check({OpKind::none, 0});
  bool moved = false;
  for (int p = 0; p < comm_.world_size(); ++p) {
    if (p == comm_.rank()) continue;
    moved |= push(p);
    moved |= pull(p);
  }
  return moved;
}

void PointToPoint::finish(const MessagePtr& message, std::exception_ptr error) { finished_.emplace_back(message, std::move(error)); }

void PointToPoint::fail_all(std::exception_ptr error) {
  std::vector<MessagePtr> all;
  {
    std::lock_guard lock(mutex_);
    for (auto& [message, ignored] : finished_) message->settle(ignored);
    finished_.clear();
    for (Outgoing& out : out_) {
      all.insert(all.end(), out.waiting.begin(), out.waiting.end());
      all.insert(all.end(), out.unconfirmed.begin(), out.unconfirmed.end());
      out = {};
    }
    for (Incoming& in : in_) {
      for (Arrival& arrival : in.aside)
        if (arrival.recv) all.push_back(arrival.recv);
      in = {};
    }
    all.insert(all.end(), recvs_.begin(), recvs_.end());
    recvs_.clear();
    active_.store(0, std::memory_order_relaxed);
    debts_.store(0, std::memory_order_relaxed);
  }
  for (auto& message : all) message->settle(error);
}

// --- sender ---------------------------------------------------------------------------------------------------------------------

bool PointToPoint::push(int dst) {
  Outgoing& out = out_[dst];
  if (out.waiting.empty() && out.unconfirmed.empty()) return false;
  Channel& channel = transport_.channel(comm_.rank(), dst);
  bool moved = false;
  while (!out.waiting.empty() && post(dst, out.waiting.front())) {
    out.waiting.pop_front();
    moved = true;
  }
  const size_t ring_bytes = transport_.ring_bytes(), segment = ring_bytes / channel_segments;
  while (!out.streams.empty()) {
    auto& [message, poured] = out.streams.front();
    const uint64_t filled = channel.bytes_filled.value.load(std::memory_order_relaxed);
    const uint64_t room = ring_bytes - (filled - channel.bytes_drained.value.load(std::memory_order_acquire));
    const size_t at = filled % ring_bytes;
    const size_t length = std::min({message->nbytes_ - poured, segment, static_cast<size_t>(room), ring_bytes - at});
    if (length == 0) break;
    std::memcpy(transport_.ring(comm_.rank(), dst) + at, message->data_ + poured, length);
    channel.bytes_filled.value.store(filled + length, std::memory_order_release);
    transport_.notify(dst);
    poured += length;
    moved = true;
    if (poured == message->nbytes_) out.streams.pop_front();
  }
  for (;;) {
    const uint64_t seen = channel.acks_seen.value.load(std::memory_order_relaxed);
    if (seen == channel.acks_sent.value.load(std::memory_order_acquire)) break;
    const Acknowledgement ack = channel.acks[seen % channel_slots];
    channel.acks_seen.value.store(seen + 1, std::memory_order_release);
    transport_.notify(dst);  // the receiver may wait for room
    auto found = std::find_if(out.unconfirmed.begin(), out.unconfirmed.end(), [&](const MessagePtr& m) { return m->id_ == ack.id; });
    if (found == out.unconfirmed.end()) continue;
    MessagePtr message = *found;
    out.unconfirmed.erase(found);
    finish(message, ack.matched ? nullptr : mismatch(true, dst, *message, ack.count, static_cast<DType>(ack.dtype)));
    moved = true;
  }
  return moved;
}

// Puts the message into a slot; false when none is free.
bool PointToPoint::post(int dst, const MessagePtr& message) {
  Outgoing& out = out_[dst];
  Channel& channel = transport_.channel(comm_.rank(), dst);
  if (out.posted - channel.taken.value.load(std::memory_order_acquire) >= channel_slots) return false;
  MessageSlot& slot = channel.slots[out.posted % channel_slots];
  slot.count = message->count_;
  slot.dtype = static_cast<uint32_t>(message->dtype_);
  slot.tag = message->tag_;
  slot.address = reinterpret_cast<uint64_t>(message->data_);
  slot.region = transport_.find_region(message->data_, message->nbytes_);
  const bool kernel = transport_.reach() == Transport::Reach::kernel && message->nbytes_ >= kernel_from && message->nbytes_ <= kernel_until;
  if (message->nbytes_ <= message_inline_bytes) {
    slot.mode = MessageMode::in_slot;
    if (message->nbytes_) std::memcpy(slot.payload, message->data_, message->nbytes_);
  } else if (slot.region || kernel || transport_.reach() == Transport::Reach::pointer) {
    slot.mode = MessageMode::in_place;
  } else {
    slot.mode = MessageMode::streamed;
    out.streams.emplace_back(message, 0);
  }
  message->passive_ = slot.mode != MessageMode::streamed;
  message->id_ = ++out.posted;
  out.unconfirmed.push_back(message);
  slot.id.store(message->id_, std::memory_order_release);
  transport_.notify(dst);
  return true;
}

// --- receiver -------------------------------------------------------------------------------------------------------------------

bool PointToPoint::expected_from(int src) const {
  return std::any_of(recvs_.begin(), recvs_.end(), [src](const MessagePtr& m) { return m->peer_ == src || m->peer_ == any_source; });
}

MessagePtr PointToPoint::find_recv(int src, int tag) {
  auto found = std::find_if(recvs_.begin(), recvs_.end(),
                            [&](const MessagePtr& m) { return (m->peer_ == src || m->peer_ == any_source) && m->tag_ == tag; });
  if (found == recvs_.end()) return nullptr;
  MessagePtr message = *found;
  recvs_.erase(found);
  message->peer_ = src;
  return message;
}

bool PointToPoint::pull(int src) {
  Incoming& in = in_[src];
  bool moved = flush_acks(src);
  if (!in.aside.empty() && !recvs_.empty()) moved |= match_aside(src);
  for (;;) {
    if (in.stream) {
      if (!drain(src)) return moved;
      moved = true;
      continue;
    }
    if (!expected_from(src)) return moved;
    Channel& channel = transport_.channel(src, comm_.rank());
    MessageSlot& slot = channel.slots[in.taken % channel_slots];
    if (slot.id.load(std::memory_order_acquire) != in.taken + 1) return moved;
    const auto dtype = static_cast<DType>(slot.dtype);
    in.aside.push_back({src,
                        slot.tag,
                        dtype,
                        slot.mode,
                        in.taken + 1,
                        slot.count,
                        slot.count * size_of(dtype),
                        slot.address,
                        slot.region,
                        0,
                        false,
                        {},
                        nullptr});
    auto arrival = std::prev(in.aside.end());
    arrival->recv = find_recv(src, arrival->tag);
    if (arrival->mode == MessageMode::in_slot) {
      arrival->data.assign(slot.payload, slot.payload + arrival->nbytes);
    } else if (arrival->mode == MessageMode::streamed) {
      if (arrival->recv && (arrival->recv->count_ != arrival->count || arrival->recv->dtype_ != dtype)) arrival->discard = true;
      if (!arrival->recv) arrival->data.resize(arrival->nbytes);
      in.stream = &*arrival;
    }
    channel.taken.value.store(++in.taken, std::memory_order_release);
    transport_.notify(src);
    moved = true;
    if (!in.stream && arrival->recv) deliver(src, arrival);
  }
}

// Takes what lies in the data ring of the current stream. False when nothing moved.
bool PointToPoint::drain(int src) {
  Incoming& in = in_[src];
  Arrival& arrival = *in.stream;
  Channel& channel = transport_.channel(src, comm_.rank());
  const size_t ring_bytes = transport_.ring_bytes();
  bool moved = false;
  while (arrival.received < arrival.nbytes) {
    const uint64_t drained = channel.bytes_drained.value.load(std::memory_order_relaxed);
    const uint64_t there = channel.bytes_filled.value.load(std::memory_order_acquire) - drained;
    const size_t at = drained % ring_bytes;
    const size_t length = std::min({arrival.nbytes - arrival.received, static_cast<size_t>(there), ring_bytes - at});
    if (length == 0) return moved;
    std::byte* to = arrival.data.empty() ? arrival.recv->data_ : arrival.data.data();
    if (!arrival.discard) std::memcpy(to + arrival.received, transport_.ring(src, comm_.rank()) + at, length);
    channel.bytes_drained.value.store(drained + length, std::memory_order_release);
    transport_.notify(src);
    arrival.received += length;
    moved = true;
  }
  in.stream = nullptr;
  if (arrival.recv) deliver(src, std::find_if(in.aside.begin(), in.aside.end(), [&](const Arrival& a) { return &a == &arrival; }));
  return true;
}

// New recvs may want what was put aside.
bool PointToPoint::match_aside(int src) {
  bool moved = false;
  Incoming& in = in_[src];
  for (auto it = in.aside.begin(); it != in.aside.end();) {
    auto arrival = it++;
    if (arrival->recv || !(arrival->recv = find_recv(src, arrival->tag))) continue;
    moved = true;
    if (in.stream != &*arrival) deliver(src, arrival);  // else when its data are complete
  }
  return moved;
}

// All data are here (or can be fetched): hands them to the matched recv, tells the sender, forgets the arrival.
void PointToPoint::deliver(int src, std::list<Arrival>::iterator arrival) {
  Message& recv = *arrival->recv;
  const bool agrees = recv.count_ == arrival->count && recv.dtype_ == arrival->dtype;
  if (agrees && arrival->nbytes) {
    if (arrival->mode == MessageMode::in_place) {
      if (const std::byte* from = transport_.map_address(src, arrival->address, arrival->region))
        std::memcpy(recv.data_, from, arrival->nbytes);
      else transport_.read_peer(src, reinterpret_cast<const void*>(arrival->address), recv.data_, arrival->nbytes, {OpKind::recv, 0});
    } else if (!arrival->data.empty()) {
      std::memcpy(recv.data_, arrival->data.data(), arrival->nbytes);
    }
  }
  acknowledge(src, *arrival, recv, agrees);
  finish(arrival->recv, agrees ? nullptr : mismatch(false, src, recv, arrival->count, arrival->dtype));
  in_[src].aside.erase(arrival);
}

void PointToPoint::acknowledge(int src, const Arrival& arrival, const Message& recv, bool matched) {
  in_[src].acks.push_back({arrival.id, recv.count_, static_cast<uint32_t>(recv.dtype_), matched});
  debts_.fetch_add(1, std::memory_order_relaxed);
  flush_acks(src);
  if (!in_[src].acks.empty()) comm_.wake_worker();
}

bool PointToPoint::flush_acks(int src) {
  Incoming& in = in_[src];
  Channel& channel = transport_.channel(src, comm_.rank());
  bool moved = false;
  while (!in.acks.empty()) {
    const uint64_t sent = channel.acks_sent.value.load(std::memory_order_relaxed);
    if (sent - channel.acks_seen.value.load(std::memory_order_acquire) >= channel_slots) break;
    channel.acks[sent % channel_slots] = in.acks.front();
    in.acks.pop_front();
    debts_.fetch_sub(1, std::memory_order_relaxed);
    channel.acks_sent.value.store(sent + 1, std::memory_order_release);
    transport_.notify(src);
    moved = true;
  }
  return moved;
}

std::exception_ptr PointToPoint::mismatch(bool sending, int peer, const Message& mine, size_t count, DType dtype) const {
  const OpInfo info{sending ? OpKind::send : OpKind::recv, 0};
  std::string what = mine.dtype_ != dtype ? std::string("dtype=") + to_string(mine.dtype_) + " here, " + to_string(dtype)
                                          : "count=" + std::to_string(mine.count_) + " here, " + std::to_string(count);
  what +=
      " on rank " + std::to_string(peer) + " (tag " + std::to_string(mine.tag_) + "). A recv must have the count and dtype of its send.";
  return std::make_exception_ptr(
      CommError(ErrorKind::mismatch, transport_.where(info) + what, comm_.rank(), comm_.world_size(), info, peer));
}

}  // namespace pycomm
