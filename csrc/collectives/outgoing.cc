// outgoing.cc -- see outgoing.h.
#include "outgoing.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "../transport/kernel_copy.h"

namespace pycomm {

namespace {

// Two copies through a ring that stays in cache beat one by the kernel, which pins every page, until the
// message is many times as large as a ring can be (docs/log.md).
constexpr size_t kernel_from = 4 << 20, kernel_from_rings = 8;
constexpr size_t kernel_until = 64 << 20;
// The receiver drains one segment while the sender pours the next. A small message is cut finer than the
// ring.
constexpr size_t least_segment = 16 << 10, longest_segment = 128 << 10;
constexpr size_t segments_of_a_message = 8;
constexpr auto look_every = std::chrono::milliseconds(10);

constexpr const char* deferred =
    " This small send was complete before its recv was posted, so the next operation raises the error and "
    "does not run. That operation can be repeated.";

}  // namespace

bool Outgoing::push() {
  if (waiting_.empty() && unconfirmed_.empty()) return false;
  bool moved = false;
  while (!again_.empty() && post_again(again_.front())) {
    again_.pop_front();
    moved = true;
  }
  while (!waiting_.empty() && post(waiting_.front())) {
    waiting_.pop_front();
    moved = true;
  }
  just_issued_ = false;
  if (pour()) {
    moved = true;
    if (!streams_.empty()) call_worker();  // the rest waits for room
  }
  moved |= take_acknowledgements();
  return moved;
}

bool Outgoing::by_kernel(size_t nbytes) const {
  const size_t from = std::min(kernel_from, kernel_from_rings * transport_.ring_bytes());
  return transport_.reach() == Transport::Reach::kernel && nbytes > from && nbytes <= kernel_until;
}

// Puts the message into a slot; false when none is free.
bool Outgoing::post(const MessagePtr& message) {
  if (!has_slot()) return false;
  const size_t nbytes = message->nbytes();
  MessageSlot& slot = channel().slots[posted_ % channel_slots];
  slot.count = message->spec().count;
  slot.dtype = static_cast<uint32_t>(message->spec().dtype);
  slot.tag = message->spec().tag;
  slot.address = reinterpret_cast<uint64_t>(message->data());
  slot.region = transport_.find_region(message->data(), nbytes);
  if (nbytes <= message_inline_bytes) {
    slot.mode = expects_receiver(*message) ? MessageMode::eager : MessageMode::in_slot;
    if (nbytes) std::memcpy(slot.payload, message->data(), nbytes);
  } else if (slot.region || transport_.reach() == Transport::Reach::pointer ||
             (by_kernel(nbytes) && kernel_admits_peers() && kernel_reaches(message->data(), nbytes))) {
    slot.mode = MessageMode::in_place;
  } else {
    slot.mode = MessageMode::streamed;
    streams_.emplace_back(message, 0);
  }
  message->posted(++posted_);
  if (slot.mode != MessageMode::streamed) message->leave_to_receiver();
  if (slot.mode == MessageMode::eager) {
    ++eager_;
    tally_.end(message, nullptr);
  } else {
    unconfirmed_.push_back(message);
  }
  slot.id.store(posted_, std::memory_order_release);  // everything above is visible to whoever sees the id
  transport_.notify(dst_);
  if (slot.mode == MessageMode::in_place && nbytes >= worth_the_worker) call_worker();
  return true;
}

// False: the receiver has closed the group or died, as far as this rank knows.
bool Outgoing::expects_receiver(const Message& message) {
  if (transport_.peer_closed(dst_)) return false;
  const auto now = just_issued_ ? message.issued() : std::chrono::steady_clock::now();
  if (now < next_look_) return true;
  if (!transport_.peer_alive(dst_)) return false;
  next_look_ = now + look_every;
  return true;
}

// See [Note: no right to copy] in send_recv.h.
bool Outgoing::post_again(const MessagePtr& message) {
  if (!has_slot()) return false;
  MessageSlot& slot = channel().slots[posted_ % channel_slots];
  slot.mode = MessageMode::again;
  slot.address = message->id();
  message->take_back();
  streams_.emplace_back(message, 0);
  slot.id.store(++posted_, std::memory_order_release);
  transport_.notify(dst_);
  return true;
}

// The receiver's, unless one of its callers takes whatever comes; [Note: who moves a message].
void Outgoing::call_worker() const {
  if (transport_.control(dst_).attending.load(std::memory_order_relaxed) == 0) transport_.ring_helper(dst_);
}

// Pours streamed messages through the ring, one behind the other.
bool Outgoing::pour() {
  Channel& channel = this->channel();
  const size_t ring_bytes = transport_.ring_bytes();
  const size_t longest = std::min(longest_segment, ring_bytes / channel_segments);
  bool moved = false;
  while (!streams_.empty()) {
    auto& [message, poured] = streams_.front();
    const uint64_t filled = channel.bytes_filled.value.load(std::memory_order_relaxed);
    const uint64_t room = ring_bytes - (filled - channel.bytes_drained.value.load(std::memory_order_acquire));
    const size_t at = filled % ring_bytes;
    const size_t segment =
        std::min(longest, std::max(least_segment, message->nbytes() / segments_of_a_message));
    const size_t length =
        std::min({message->nbytes() - poured, segment, static_cast<size_t>(room), ring_bytes - at});
    if (length == 0) break;
    std::memcpy(transport_.ring(transport_.rank(), dst_) + at, message->data() + poured, length);
    channel.bytes_filled.value.store(filled + length, std::memory_order_release);
    transport_.notify(dst_);
    poured += length;
    moved = true;
    if (poured == message->nbytes()) {
      message->leave_to_receiver();
      streams_.pop_front();
    }
  }
  return moved;
}

bool Outgoing::take_acknowledgements() {
  Channel& channel = this->channel();
  bool moved = false;
  for (;;) {
    const uint64_t seen = channel.acks_seen.value.load(std::memory_order_relaxed);
    if (seen == channel.acks_sent.value.load(std::memory_order_acquire)) return moved;
    const Acknowledgement ack = channel.acks[seen % channel_slots];
    channel.acks_seen.value.store(seen + 1, std::memory_order_release);
    transport_.notify(dst_);  // the receiver may wait for room
    const Other theirs{ack.count, static_cast<DType>(ack.dtype)};
    if (ack.eager) {
      tally_.defer(mismatch(transport_, OpKind::send,
                            {static_cast<DType>(ack.sent_dtype), ack.sent_count, dst_, ack.tag}, dst_, theirs,
                            deferred));
      moved = true;
      continue;
    }
    auto found = std::find_if(unconfirmed_.begin(), unconfirmed_.end(),
                              [&](const MessagePtr& m) { return m->id() == ack.id; });
    if (found == unconfirmed_.end()) continue;
    moved = true;
    if (ack.matched == send_again) {
      again_.push_back(*found);
      continue;
    }
    MessagePtr message = *found;
    unconfirmed_.erase(found);
    tally_.end(message,
               ack.matched ? nullptr : mismatch(transport_, OpKind::send, message->spec(), dst_, theirs));
  }
}

std::string Outgoing::unreceived() const {
  if (!transport_.peer_closed(dst_)) return "";  // it may still take them
  const uint64_t count = eager_ - channel().eager_matched.load(std::memory_order_acquire);
  if (count == 0) return "";
  return std::to_string(count) + (count == 1 ? " message" : " messages") + " to " + transport_.name(dst_);
}

void Outgoing::give_up(const std::exception_ptr& error) {
  if (!unconfirmed_.empty() && !transport_.forked()) withdraw();
  for (const auto* messages : {&waiting_, &unconfirmed_})
    for (const MessagePtr& message : *messages) tally_.end(message, error);
  waiting_.clear();
  unconfirmed_.clear();
  again_.clear();
  streams_.clear();
}

// See [Note: withdrawn messages] in send_recv.h.
void Outgoing::withdraw() {
  Channel& channel = this->channel();
  channel.withdrawn.value.store(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what the caller writes from now on comes after it
  if (transport_.reach() != Transport::Reach::pointer) return;
  while (channel.copying.value.load(std::memory_order_seq_cst)) std::this_thread::yield();
}

}  // namespace pycomm
