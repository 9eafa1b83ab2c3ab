// incoming.h -- what this rank receives from one peer: the receiving end of a channel (send_recv.h), and the
// recvs that wait for a message.
#pragma once

#include <deque>
#include <list>

#include "message.h"

namespace pycomm {

// Recvs that have been posted and have no message yet, in order.
class PostedRecvs {
 public:
  void add(MessagePtr recv) { recvs_.push_back(std::move(recv)); }
  bool empty() const { return recvs_.empty(); }
  bool expected_from(int src) const;
  // The first that matches, or nullptr. On the way those end that are claimed elsewhere.
  MessagePtr take(int src, int tag, Tally& tally);
  void drop(Message& recv, Tally& tally);  // claimed elsewhere; if it is still here
  void give_up(Tally& tally, const std::exception_ptr& error);

 private:
  std::deque<MessagePtr> recvs_;
};

// Used under the lock of its SendRecv.
class Incoming {
 public:
  Incoming(Communicator& comm, int src, PostedRecvs& recvs, Tally& tally)
      : comm_(comm), transport_(comm.transport()), src_(src), recvs_(recvs), tally_(tally) {}

  bool pull();  // as far as it goes without waiting; true: something moved
  void give_up(const std::exception_ptr& error);  // ends all recvs that are unfinished
  // The eager messages that have arrived and matched no recv, as text; or empty.
  std::string unreceived() const;

 private:
  // A message that has left its slot but has no recv yet, or whose data are still arriving.
  struct Arrival {
    int tag = 0;
    DType dtype = DType::u8;
    MessageMode mode = MessageMode::in_slot;
    uint64_t id = 0;
    size_t count = 0;
    size_t nbytes = 0;
    uint64_t address = 0;
    uint32_t region = 0;
    size_t received = 0;  // streamed: bytes so far
    bool discard = false;  // streamed: a mismatch, drain into nothing
    std::vector<std::byte> data{};  // private copy
    MessagePtr recv{};  // once matched

    bool agrees() const { return recv->spec().count == count && recv->spec().dtype == dtype; }
  };

  bool take_next();
  bool drain();
  bool match_aside();
  void deliver(std::list<Arrival>::iterator arrival);
  bool copy_data(const Arrival& arrival);  // false: the sender has to send them again
  bool copy_in_place(const Arrival& arrival);
  void take_again(const MessageSlot& slot);
  void refuse_withdrawn();
  void note_matched(const Arrival& arrival);
  void acknowledge(const Arrival& arrival, uint8_t matched);
  bool flush_acks();
  void forget_acks();
  Channel& channel() const { return transport_.channel(src_, transport_.rank()); }

  Communicator& comm_;
  Transport& transport_;
  const int src_;
  PostedRecvs& recvs_;
  Tally& tally_;
  uint64_t taken_ = 0;
  uint64_t eager_matched_ = 0;
  std::list<Arrival> aside_;  // in order of sending
  Arrival* stream_ = nullptr;  // the one whose data are arriving
  int sent_again_ = 0;  // of those in aside_, how many are to be
  std::deque<Acknowledgement> acks_;  // waiting for room
};

}  // namespace pycomm
