// send_recv.h -- point-to-point messages: send, recv, any source, tags.
//
// Messages are not part of the group's sequence: they progress on their own, whoever calls progress(): a waiter, the worker, or
// a rank that waits inside a collective. So any order of isend and irecv on any ranks completes.
//
// A channel (one per ordered pair of ranks, transport/layout.h) is a ring of message slots and a ring of data bytes. By size and reach:
//   in_slot    up to 960 bytes: header and data in one slot
//   in_place   the slot carries the sender's address; the receiver copies from there (same process, registered, or by the kernel)
//   streamed   the sender pours the data through the ring, the receiver drains it
// A slot is announced by its id (stored last). The receiver takes slots in order; a message without a matching recv is put aside
// (streamed and in_slot data into private memory), but only when some recv is waiting, else it stays in the channel.
// Every message ends with an acknowledgement that says whether count and dtype agreed; so a send completes when its recv has matched,
// and a mismatch raises on both sides. This is the meaning torch users know from Gloo and NCCL (a send is not buffered).
#pragma once

#include <deque>
#include <list>
#include <memory>

#include "../communicator.h"
#include "op.h"

namespace pycomm {

inline constexpr int any_source = -1;

class PointToPoint;

class Message : public Work {
 public:
  void wait(double timeout = 0) override;
  bool poll() override;
  void help(bool nobody_waits = false) override;
  int source() const { return peer_; }  // of a completed recv

 private:
  friend class PointToPoint;
  PointToPoint* engine_ = nullptr;
  bool sending_ = false;
  bool helped_ = false;
  std::atomic<bool> passive_{false};  // a send that the receiver can complete without this rank
  int asked_ = 0;             // destination or source as the caller gave it, perhaps any_source
  std::atomic<int> peer_{0};  // the same, or the source once matched
  int tag_ = 0;
  DType dtype_ = DType::u8;
  size_t count_ = 0;
  size_t nbytes_ = 0;
  std::byte* data_ = nullptr;
  double timeout_ = 0;
  std::chrono::steady_clock::time_point issued_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point next_look_ = issued_;
  uint64_t id_ = 0;       // in its channel
};

using MessagePtr = std::shared_ptr<Message>;

class PointToPoint : public BackgroundProgress {
 public:
  explicit PointToPoint(Communicator& comm);

  Transport& transport() { return transport_; }

  // Throw std::invalid_argument for a bad peer. `data` must stay valid until the message is done; `finalizer` runs just before.
  MessagePtr send(const std::byte* data, size_t count, DType dtype, int dst, int tag, double timeout, std::function<void()> finalizer);
  MessagePtr recv(std::byte* data, size_t count, DType dtype, int src, int tag, double timeout, std::function<void()> finalizer);

  bool progress() override;
  void fail_all(std::exception_ptr error) override;
  bool owes() const override { return debts_.load(std::memory_order_relaxed) > 0; }
  bool wants_worker() const override { return helped_.load(std::memory_order_relaxed) + debts_.load(std::memory_order_relaxed) > 0; }

 private:
  friend class Message;

  // A message that has left its slot but has no recv yet, or whose data are still arriving.
  struct Arrival {
    int src;
    int tag;
    DType dtype;
    MessageMode mode;
    uint64_t id;
    size_t count;
    size_t nbytes;
    uint64_t address;
    uint32_t region;
    size_t received = 0;            // streamed: bytes so far
    bool discard = false;           // streamed: a mismatch, drain into nothing
    std::vector<std::byte> data;    // private copy
    MessagePtr recv;                // once matched
  };
  struct Outgoing {
    uint64_t posted = 0;                 // messages put into slots
    std::deque<MessagePtr> waiting;      // for a free slot
    std::deque<MessagePtr> unconfirmed;  // in slots or beyond, not yet acknowledged
    std::deque<std::pair<MessagePtr, size_t>> streams;  // bytes already poured
  };
  struct Incoming {
    uint64_t taken = 0;
    std::list<Arrival> aside;        // in order of sending
    Arrival* stream = nullptr;       // the one whose data are arriving
    std::deque<Acknowledgement> acks;   // waiting for room
  };

  MessagePtr make(bool sending, std::byte* data, size_t count, DType dtype, int peer, int tag, double timeout,
                  std::function<void()> finalizer);
  void wait(Message& message, double timeout);
  void poll(Message& message);
  WaitScope scope_of(const Message& message, double timeout) const;
  void help(Message& message, bool nobody_waits);
  bool advance();
  bool push(int dst);
  bool post(int dst, const MessagePtr& message);
  bool pull(int src);
  bool drain(int src);
  bool match_aside(int src);
  void deliver(int src, std::list<Arrival>::iterator arrival);
  bool expected_from(int src) const;
  MessagePtr find_recv(int src, int tag);
  void acknowledge(int src, const Arrival& arrival, const Message& recv, bool matched);
  bool flush_acks(int src);
  void finish(const MessagePtr& message, std::exception_ptr error);
  std::exception_ptr mismatch(bool sending, int peer, const Message& mine, size_t count, DType dtype) const;

  Communicator& comm_;
  Transport& transport_;
  std::mutex mutex_;
  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
  std::deque<MessagePtr> recvs_;       // posted, unmatched, in order
  std::vector<std::pair<MessagePtr, std::exception_ptr>> finished_;  // to be settled once the lock is released
  std::atomic<int> helped_{0};
  std::atomic<int> active_{0};   // unfinished messages
  std::atomic<int> debts_{0};    // acknowledgements that wait for room
};

}  // namespace pycomm
