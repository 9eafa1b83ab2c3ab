// incoming.cc -- see incoming.h.
#include "incoming.h"

#include <algorithm>
#include <cstring>

namespace pycomm {

bool PostedRecvs::expected_from(int src) const {
  return std::any_of(recvs_.begin(), recvs_.end(),
                     [src](const MessagePtr& m) { return m->comes_from(src) && !m->claimed_elsewhere(); });
}

MessagePtr PostedRecvs::take(int src, int tag, Tally& tally) {
  for (;;) {
    auto found =
        std::find_if(recvs_.begin(), recvs_.end(), [&](const MessagePtr& m) { return m->matches(src, tag); });
    if (found == recvs_.end()) return nullptr;
    MessagePtr message = *found;
    recvs_.erase(found);
    if (message->claim()) {
      message->matched(src);
      return message;
    }
    tally.end(std::move(message), nullptr);
  }
}

void PostedRecvs::drop(Message& recv, Tally& tally) {
  const auto found =
      std::find_if(recvs_.begin(), recvs_.end(), [&](const MessagePtr& m) { return m.get() == &recv; });
  if (found == recvs_.end()) return;
  tally.end(*found, nullptr);
  recvs_.erase(found);
}

void PostedRecvs::give_up(Tally& tally, const std::exception_ptr& error) {
  for (const MessagePtr& recv : recvs_) tally.end(recv, error);
  recvs_.clear();
}

bool Incoming::pull() {
  bool moved = flush_acks();
  if (!aside_.empty() && !recvs_.empty()) moved |= match_aside();
  for (;;) {
    if (stream_ ? !drain() : !take_next()) return moved;
    moved = true;
  }
}

// Takes the next message out of its slot, if there is one and some recv may want it.
bool Incoming::take_next() {
  if (!recvs_.expected_from(src_) && !sent_again_) return false;
  Channel& channel = this->channel();
  MessageSlot& slot = channel.slots[taken_ % channel_slots];
  if (slot.id.load(std::memory_order_acquire) != taken_ + 1) return false;
  if (slot.mode == MessageMode::again) {
    take_again(slot);
    channel.taken.store(++taken_, std::memory_order_release);
    transport_.notify(src_);
    return true;
  }
  const auto dtype = static_cast<DType>(slot.dtype);
  aside_.push_back({slot.tag, dtype, slot.mode, taken_ + 1, slot.count, slot.count * size_of(dtype),
                    slot.address, slot.region});
  auto arrival = std::prev(aside_.end());
  arrival->recv = recvs_.take(src_, arrival->tag, tally_);
  note_matched(*arrival);
  if (arrival->mode == MessageMode::in_slot || arrival->mode == MessageMode::eager) {
    if (!arrival->recv) arrival->data.assign(slot.payload, slot.payload + arrival->nbytes);
    else if (arrival->agrees() && arrival->nbytes)
      std::memcpy(arrival->recv->data(), slot.payload, arrival->nbytes);  // once the slot is free it is lost
  } else if (arrival->mode == MessageMode::streamed) {
    if (arrival->recv) arrival->discard = !arrival->agrees();
    else arrival->data.resize(arrival->nbytes);
    stream_ = &*arrival;
  }
  channel.taken.store(++taken_, std::memory_order_release);
  transport_.notify(src_);
  if (!stream_ && arrival->recv) deliver(arrival);
  return true;
}

// See [Note: no right to copy] in send_recv.h.
void Incoming::take_again(const MessageSlot& slot) {
  stream_ =
      &*std::find_if(aside_.begin(), aside_.end(), [&](const Arrival& a) { return a.id == slot.address; });
  stream_->mode = MessageMode::streamed;
  --sent_again_;
}

// Takes what lies in the data ring of the current stream. False when nothing moved.
bool Incoming::drain() {
  Arrival& arrival = *stream_;
  Channel& channel = this->channel();
  const size_t ring_bytes = transport_.ring_bytes();
  bool moved = false;
  while (arrival.received < arrival.nbytes) {
    const uint64_t drained = channel.bytes_drained.value.load(std::memory_order_relaxed);
    const uint64_t there = channel.bytes_filled.value.load(std::memory_order_acquire) - drained;
    const size_t at = drained % ring_bytes;
    const size_t length =
        std::min({arrival.nbytes - arrival.received, static_cast<size_t>(there), ring_bytes - at});
    if (length == 0) {  // its other pieces need this rank, too
      if (arrival.recv && arrival.recv->trust() == Trust::lent) tally_.entrust(*arrival.recv, Trust::given);
      return moved;
    }
    std::byte* to = arrival.data.empty() ? arrival.recv->data() : arrival.data.data();
    if (!arrival.discard)
      std::memcpy(to + arrival.received, transport_.ring(src_, transport_.rank()) + at, length);
    channel.bytes_drained.value.store(drained + length, std::memory_order_release);
    transport_.notify(src_);
    arrival.received += length;
    moved = true;
  }
  stream_ = nullptr;
  if (arrival.recv)
    deliver(std::find_if(aside_.begin(), aside_.end(), [&](const Arrival& a) { return &a == &arrival; }));
  return true;
}

// New recvs may want what was put aside.
bool Incoming::match_aside() {
  bool moved = false;
  for (auto it = aside_.begin(); it != aside_.end();) {
    auto arrival = it++;
    if (arrival->recv || !(arrival->recv = recvs_.take(src_, arrival->tag, tally_))) continue;
    moved = true;
    note_matched(*arrival);
    if (stream_ != &*arrival) deliver(arrival);  // else when its data are complete
  }
  return moved;
}

// All data are here (or can be fetched): hands them to the matched recv, tells the sender, forgets the
// arrival.
void Incoming::deliver(std::list<Arrival>::iterator arrival) {
  const bool agrees = arrival->agrees();
  if (agrees && arrival->nbytes && !copy_data(*arrival)) {
    ++sent_again_;
    return acknowledge(*arrival, send_again);
  }
  if (arrival->mode != MessageMode::eager || !agrees) acknowledge(*arrival, agrees);
  tally_.end(arrival->recv, agrees ? nullptr
                                   : mismatch(transport_, OpKind::recv, arrival->recv->spec(), src_,
                                              {arrival->count, arrival->dtype}));
  aside_.erase(arrival);
}

bool Incoming::copy_data(const Arrival& arrival) {
  if (arrival.mode == MessageMode::in_place) return copy_in_place(arrival);
  if (!arrival.data.empty()) std::memcpy(arrival.recv->data(), arrival.data.data(), arrival.nbytes);
  return true;
}

// See [Note: withdrawn messages] in send_recv.h.
bool Incoming::copy_in_place(const Arrival& arrival) {
  struct Copying {
    std::atomic<uint64_t>& word;
    explicit Copying(std::atomic<uint64_t>& word) : word(word) { word.store(1, std::memory_order_seq_cst); }
    ~Copying() { word.store(0, std::memory_order_release); }
  } copying(channel().copying.value);
  refuse_withdrawn();
  std::byte* to = arrival.recv->data();
  if (const std::byte* from = transport_.map_address(src_, arrival.address, arrival.region))
    std::memcpy(to, from, arrival.nbytes);
  else if (!transport_.may_read(src_)) return false;
  else
    transport_.read_peer(src_, reinterpret_cast<const void*>(arrival.address), to, arrival.nbytes,
                         {OpKind::recv, 0});
  std::atomic_thread_fence(std::memory_order_acquire);  // the loads of the copy come before the second look
  refuse_withdrawn();
  return true;
}

void Incoming::refuse_withdrawn() {
  if (!channel().withdrawn.value.load(std::memory_order_seq_cst)) return;
  const OpInfo recv{OpKind::recv, 0};
  if (transport_.broken()) transport_.check(recv);
  transport_.fail(ErrorKind::peer, recv, src_,
                  "rank " + std::to_string(src_) + " closed the group before its message was taken");
}

// If the recv was posted first, this comes before the store of `taken`, so the sender fetches the line once.
void Incoming::note_matched(const Arrival& arrival) {
  if (arrival.recv && arrival.mode == MessageMode::eager)
    channel().eager_matched.store(++eager_matched_, std::memory_order_release);
}

void Incoming::acknowledge(const Arrival& arrival, uint8_t matched) {
  const MessageSpec& recv = arrival.recv->spec();
  acks_.push_back({arrival.id, recv.count, arrival.count, arrival.tag, static_cast<uint8_t>(recv.dtype),
                   static_cast<uint8_t>(arrival.dtype), matched, arrival.mode == MessageMode::eager});
  Tally::add(tally_.debts, 1);
  flush_acks();
  if (!acks_.empty()) comm_.lend_worker(false);
}

bool Incoming::flush_acks() {
  Channel& channel = this->channel();
  bool moved = false;
  while (!acks_.empty()) {
    const uint64_t sent = channel.acks_sent.value.load(std::memory_order_relaxed);
    if (sent - channel.acks_seen.value.load(std::memory_order_acquire) >= channel_slots) break;
    const bool eager = acks_.front().eager;
    channel.acks[sent % channel_slots] = acks_.front();
    acks_.pop_front();
    Tally::add(tally_.debts, -1);
    channel.acks_sent.value.store(sent + 1, std::memory_order_release);
    if (eager) transport_.control(src_).deferred_errors.fetch_add(1, std::memory_order_release);
    transport_.notify(src_);
    moved = true;
  }
  if (!acks_.empty() && transport_.peer_closed(src_)) forget_acks();  // it makes no room any more
  return moved;
}

std::string Incoming::unreceived() const {
  std::vector<MessageSpec> found;
  for (const Arrival& arrival : aside_)
    if (arrival.mode == MessageMode::eager && !arrival.recv)
      found.push_back({arrival.dtype, arrival.count, src_, arrival.tag});
  for (uint64_t id = taken_ + 1; id <= taken_ + channel_slots; ++id) {
    const MessageSlot& slot = channel().slots[(id - 1) % channel_slots];
    if (slot.id.load(std::memory_order_acquire) != id) break;
    if (slot.mode == MessageMode::eager)
      found.push_back({static_cast<DType>(slot.dtype), slot.count, src_, slot.tag});
  }
  if (found.empty()) return "";
  return std::to_string(found.size()) + (found.size() == 1 ? " message" : " messages") + " from " +
         transport_.name(src_) + " (the first: tag " + std::to_string(found[0].tag) + ", " +
         std::to_string(found[0].count) + " of " + to_string(found[0].dtype) + ")";
}

void Incoming::give_up(const std::exception_ptr& error) {
  for (const Arrival& arrival : aside_)
    if (arrival.recv) tally_.end(arrival.recv, error);
  aside_.clear();
  stream_ = nullptr;
  sent_again_ = 0;
  forget_acks();
}

void Incoming::forget_acks() {
  Tally::add(tally_.debts, -static_cast<int>(acks_.size()));
  acks_.clear();
}

}  // namespace pycomm
