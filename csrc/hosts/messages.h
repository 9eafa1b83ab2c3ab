// messages.h -- point-to-point messages of a group that spans hosts: send, recv, any source, tags, with the
// meaning that they have on one host (collectives/send_recv.h); but none between hosts is eager.
//
// Between ranks of one host messages go through its memory: the inner group's SendRecv moves them. Between
// hosts each pair of ranks has a link (link.h), which a rank makes when it first has to do with the other:
//
//   sender                                   receiver
//   message  id, tag, count, dtype     ->    matches a recv, or is put aside in order
//            up to 960 bytes: the data
//            recv agrees?              <-    answer   id, yes or its own count and dtype
//   payload  from where it lies, and   ->    into where it is wanted: posted before the answer
//   sent     id                        ->    the payload is here, or the engine is about to bring it
//            the memory is free again  <-    taken    id
//
// All but the payload are frames of one size: an engine may end the process where a message meets a receive
// of another. Small messages are over with the answer. So a send is complete when its recv has matched, and a
// difference of count or dtype raises on both sides and harms nothing else.
//
// [Note: no deadlock among links] An engine's wait blocks, so each link has a thread of its own, which takes
// what comes, one frame after the other. It waits for the next frame, and for what both sides have posted: a
// payload whose `sent` has come, or frames and payloads that the peer says it has. Those the engine ends by
// itself, whatever either thread does meanwhile. Nothing else blocks it: frames are posted and forgotten
// until the peer says that it has them, and it runs no callback. So each thread comes back for the next
// frame, and any order of sends and recvs on any ranks completes.
//
// [Note: one winner] A recv from any source stands here and, as a recv of its own (`half`), among those of
// this host. Both have one Claim, which is asked before a message is given to either.
//
// Messages that have ended are settled (callbacks run) by whoever waits, polls, or waits in a collective of
// the group, else by its worker; [Note: settling], collectives/send_recv.h. They are also who looks at what
// ends a message early. All sleep on the doorbell of this rank.
//
// Whoever closes the group says farewell on every link; behind it nothing comes, so a recv that is still
// without a message need not wait for its deadline.
//
// What lost: one receive from any source by the engine instead of a thread for each peer (the loss of one
// connection would end it for all, and nothing says whose it was); waiting for a payload in the link's thread
// as soon as it is asked for (two ranks that send to each other would wait for each other's thread), and in a
// further thread (one message less for large ones, twice the threads). Frames that nobody has asked for stay
// in the receiver's memory: a limit would hold up the answers behind them.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "../collectives/send_recv.h"
#include "link.h"

namespace pycomm {

class AcrossMessages final : public Messages {
 public:
  // `comm`: the group of all ranks, whose hosts' side `across` is.
  AcrossMessages(Communicator& comm, Across& across);
  ~AcrossMessages() override;

  MessageWorkPtr send(const std::byte* data, const MessageSpec& spec,
                      std::function<void()> finalizer) override;
  MessageWorkPtr recv(std::byte* data, const MessageSpec& spec, std::function<void()> finalizer) override;

  // What a message asks for while it is under way.
  void wait(RemoteMessage& message, const WaitScope& scope);
  void look(RemoteMessage& message);  // at what could end it early
  void help(RemoteMessage& message, bool nobody_waits);
  Transport& transport() { return inside_->transport(); }
  Communicator& communicator() const { return comm_; }

  bool progress() override;
  void look_at_peers() override;
  bool wants_worker() const override { return mailbox().given() > 0; }
  bool keen() const override { return false; }
  bool owes() const override { return false; }
  void fail_all(std::exception_ptr error) override;
  void raise_deferred_error() override { local().raise_deferred_error(); }
  void hold_deferred_errors(bool hold) override { local().hold_deferred_errors(hold); }
  std::vector<std::string> unreceived() override { return local().unreceived(); }
  void leave() override;
  bool on_own_thread() const override;

 private:
  using Clock = std::chrono::steady_clock;
  enum class Standing { here, closed, died, lost };
  // A forked child has a copy of it and none of its threads: it leaves it alone.
  struct State {
    Mailbox mailbox;
    std::vector<std::unique_ptr<Link>> links;  // by rank, null for those of this host
    std::vector<std::weak_ptr<RemoteMessage>> unattended;  // under the lock
    std::mutex ending;
    std::exception_ptr error;  // under the lock: that of all messages
  };

  RemotePtr make(OpKind kind, std::byte* data, const MessageSpec& spec, std::function<void()> finalizer);
  void start_half(const RemotePtr& message);
  void end_half(const RemotePtr& message, const Message& half);
  void give_up(const std::exception_ptr& error);
  void refuse_ended() const;
  bool settle();
  void examine(RemoteMessage& message, const WaitScope& scope);
  Standing standing(int rank);
  [[noreturn]] void fail(Standing standing, int rank, const WaitScope& scope);
  [[noreturn]] void fail_late(const std::vector<int>& missing, const WaitScope& scope);
  SendRecv& local() { return static_cast<SendRecv&>(*inside_->background()); }
  Mailbox& mailbox() const { return state_->mailbox; }

  Communicator& comm_;
  Across& across_;
  const std::shared_ptr<Communicator> inside_;
  std::unique_ptr<State> state_;
  Clock::time_point next_look_{};  // of the worker
};

}  // namespace pycomm
