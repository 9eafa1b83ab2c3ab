// outgoing.h -- what this rank sends to one peer: the sending end of a channel (send_recv.h).
#pragma once

#include <deque>

#include "message.h"

namespace pycomm {

// Used under the lock of its SendRecv.
class Outgoing {
 public:
  Outgoing(Transport& transport, int dst, Tally& tally) : transport_(transport), dst_(dst), tally_(tally) {}

  void add(MessagePtr message) {
    just_issued_ = waiting_.empty();
    waiting_.push_back(std::move(message));
  }
  bool push();  // as far as it goes without waiting; true: something moved
  void give_up(const std::exception_ptr& error);  // ends all that is unfinished
  bool take_acknowledgements();
  // How many eager messages matched no recv although their receiver has closed the group, as text; or empty.
  std::string unreceived() const;

 private:
  bool post(const MessagePtr& message);
  bool post_again(const MessagePtr& message);
  bool has_slot() const { return posted_ - channel().taken.load(std::memory_order_acquire) < channel_slots; }
  bool by_kernel(size_t nbytes) const;
  bool pour();
  void call_worker() const;
  bool expects_receiver(const Message& message);
  void withdraw();
  Channel& channel() const { return transport_.channel(transport_.rank(), dst_); }

  Transport& transport_;
  const int dst_;
  Tally& tally_;
  uint64_t posted_ = 0;  // messages put into slots
  uint64_t eager_ = 0;  // of those
  bool just_issued_ = false;  // the only message in waiting_, which its sender has just added
  std::chrono::steady_clock::time_point next_look_{};  // at the receiver's life
  std::deque<MessagePtr> waiting_;  // for a free slot
  std::deque<MessagePtr> unconfirmed_;  // in slots or beyond, not yet acknowledged
  std::deque<MessagePtr> again_;  // of those, what its receiver may not copy: to be streamed
  std::deque<std::pair<MessagePtr, size_t>> streams_;  // bytes already poured
};

}  // namespace pycomm
