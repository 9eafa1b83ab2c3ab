// send_recv.h -- point-to-point messages: send, recv, any source, tags.
//
// Messages are not part of the group's sequence: they progress on their own, whoever calls progress(): a
// waiter, the worker, or a rank that waits inside a collective. So any order of isend and irecv on any ranks
// completes.
//
// A channel (one per ordered pair of ranks, transport/layout.h) is a ring of message slots and a ring of data
// bytes. By size and reach:
//   eager      up to 960 bytes: header and data in one slot, and the send is complete (below)
//   in_slot    the same if the receiver has closed the group or died: the send fails for that reason
//   in_place   the slot carries the sender's address; the receiver copies from there (same process,
//              registered memory; by the kernel what is many times as large as the ring)
//   streamed   the sender pours the data through the ring, the receiver drains it; what fits into the ring is
//              poured when the message is posted, and the receiver completes it alone
// A slot is announced by its id (stored last). The receiver takes slots in order; a message without a
// matching recv is put aside (streamed and in_slot data into private memory), but only when some recv is
// waiting, else it stays in the channel. A message that is not eager ends with an acknowledgement that says
// whether count and dtype agreed; so its send completes when its recv has matched, and a mismatch raises on
// both sides.
//
// [Note: eager messages] A send of up to 960 bytes is complete once its data are in a slot
// (docs/decisions/0028). The slots are the sender's credits: if the receiver has not taken eight messages,
// the next send waits for `taken` to advance. It waits like any other message, so it ends at a death, a
// close or a deadline. If the recv agrees, the receiver sends no acknowledgement. If it does not agree, the
// recv raises at once. The sender has kept nothing, so the receiver's acknowledgement holds count and dtype
// of both sides and the tag. The receiver then increments `deferred_errors` in the sender's control block.
// The sender checks that counter when a call begins and when it closes the group, and raises the mismatch
// there:
//   receiver   writes the acknowledgement; acks_sent (release); deferred_errors + 1 (release)
//   sender     if deferred_errors (acquire) is above what it has raised: takes acknowledgements, raises one
// The receiver counts the eager messages that have matched a recv in `eager_matched`, which shares a line
// with `taken`. From that count close() finds messages that no recv can match any more. A receiver reports
// those in its slots. A sender reports the difference if its receiver has closed the group.
//
// [Note: who moves a message] Whoever waits for a message of the group, polls one, or waits in a collective
// of the group moves all of its messages. A receiver that does none of these (it computes, or waits in
// another group) must not hold up its peers, so its worker moves what it has been lent: every recv that was
// not complete when it was issued, every send that needs this rank again. The worker sleeps meanwhile, on a
// bell of its own (transport/wait.h, [Note: two bells]), and is called
//   by a peer that has waited `before_urging` for a message of this rank, or polls for one: two callers who
//     both wait never wake a worker;
//   by a sender that needs it (what it sends does not fit into the ring, or is to be copied from its memory
//   and has at least `worth_the_worker` bytes), unless a caller of this rank attends to messages; the last
//   caller to leave looks once more, so that either of the two sees the other;
//   at every flag, while it has messages that move piece by piece or that nobody will wait for (`given`) and
//     no caller of this rank waits.
// For those that nobody will wait for (somebody has a future) it also looks at the peers' lives and at the
// deadline, as a waiter would.
//
// [Note: no right to copy] A receiver that has changed its user since the group was made may not copy from
// the sender's memory any more, which the sender cannot know. It keeps the message aside with its recv and
// asks for the data (an acknowledgement that says send_again); they follow in a slot of the mode `again`,
// which names the message, and through the ring.
//
// [Note: settling] A message ends under the lock and is settled without it, one at a time: settling runs
// callbacks, which may want the GIL, issue messages, and wait for one that ended together with theirs. Such a
// nested wait takes the next ended message itself. A waiter returns only when its message is settled.
//
// [Note: withdrawn messages] A send whose group ends before a recv took it raises, and its memory is the
// caller's again, although its slot may still name the address. So a sender that gives up withdraws, and a
// receiver says when it copies:
//   receiver   copying = 1; withdrawn? then refuse; copy; withdrawn? then refuse; copying = 0
//   sender     withdrawn = 1; where both are threads of one process: while copying: wait; the sends end
// Both words are written and read in one order for all (seq_cst), so at least one of the two sees the other.
// Between threads no copy begins or goes on after the memory was given back: it may be unmapped by then.
// Nobody waits for a receiver in another process, which may be stopped or dead in the middle of a copy: it
// copies by the kernel or from its own mapping, which is safe, and its second look refuses what it has got.
#pragma once

#include <memory>
#include <thread>

#include "incoming.h"
#include "message.h"
#include "outgoing.h"

namespace pycomm {

class SendRecv final : public Messages {
 public:
  explicit SendRecv(Communicator& comm);

  Communicator& communicator() { return comm_; }
  Transport& transport() { return transport_; }

  MessageWorkPtr send(const std::byte* data, const MessageSpec& spec,
                      std::function<void()> finalizer) override {
    return start_send(data, spec, std::move(finalizer));
  }
  MessageWorkPtr recv(std::byte* data, const MessageSpec& spec, std::function<void()> finalizer) override {
    return start_recv(data, spec, std::move(finalizer));
  }
  MessagePtr start_send(const std::byte* data, const MessageSpec& spec, std::function<void()> finalizer);
  MessagePtr start_recv(std::byte* data, const MessageSpec& spec, std::function<void()> finalizer);
  void withdraw(Message& recv);  // it has been claimed elsewhere

  // A caller that moves whatever comes, while it waits.
  struct Attending {
    explicit Attending(SendRecv& messages) : messages(messages) {
      messages.attending_.fetch_add(1, std::memory_order_relaxed);
    }
    ~Attending();
    SendRecv& messages;
  };

  // What a message asks for while it is under way.
  void wait(Message& message, const WaitScope& scope);
  void look(Message& message);  // at what could end it early
  void urge(const Message& message);  // calls the workers of those it depends on
  void help(Message& message, bool nobody_waits);  // lends it to the worker

  bool progress() override;
  void look_at_peers() override;
  void fail_all(std::exception_ptr error) override;
  void raise_deferred_error() override;
  void hold_deferred_errors(bool hold) override {
    held_by_.store(hold ? std::this_thread::get_id() : std::thread::id(), std::memory_order_relaxed);
  }
  std::vector<std::string> unreceived() override;
  bool owes() const override { return tally_.debts.load(std::memory_order_relaxed) > 0; }
  bool wants_worker() const override {
    return owes() || given() || tally_.lent.load(std::memory_order_relaxed) > 0;
  }
  bool keen() const override { return given() && attending_.load(std::memory_order_relaxed) == 0; }

 private:
  bool given() const { return tally_.given.load(std::memory_order_relaxed) > 0; }
  MessagePtr make(OpKind kind, std::byte* data, const MessageSpec& spec, std::function<void()> finalizer);
  bool over(Message& message);

  bool progress(std::unique_lock<std::mutex> lock);
  bool advance();
  bool settle(std::unique_lock<std::mutex>& lock);
  void fail_after(std::exception_ptr error);

  Communicator& comm_;
  Transport& transport_;
  std::mutex mutex_;
  PostedRecvs recvs_;
  Tally tally_;
  std::vector<std::weak_ptr<Message>> unattended_;  // nobody will wait for these; under the lock
  std::chrono::steady_clock::time_point next_look_{};  // of the worker at what they depend on
  const std::atomic<uint32_t>& deferred_errors_;  // [Note: eager messages]
  std::atomic<uint32_t> raised_{0};  // of those
  std::atomic<std::thread::id> held_by_{};
  std::atomic<uint32_t>& attending_;  // callers inside wait(); peers look at it, too
  std::vector<Outgoing> out_;  // by destination
  std::vector<Incoming> in_;  // by source
};

}  // namespace pycomm
