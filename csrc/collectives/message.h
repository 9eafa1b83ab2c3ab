// message.h -- one message under way, on the side that sends it or on the side that receives it.
#pragma once

#include <deque>
#include <memory>

#include "../communicator/messages.h"
#include "traced_message.h"

namespace pycomm {

// A message of this size that its receiver copies calls the receiver's worker when it is posted, so that it
// moves while the receiver computes; for a smaller one waking a thread costs more than the copy.
inline constexpr size_t worth_the_worker = 1 << 20;

class SendRecv;

// What the worker has to do with a message: nothing; move it when a peer waits for it (lent); move it at
// every flag, because nobody may come to wait for it soon (given). over: it has ended, the worker is out of
// it.
enum class Trust : uint8_t { none, lent, given, over };

class Message final : public MessageWork, public std::enable_shared_from_this<Message> {
 public:
  Message(SendRecv& owner, OpKind kind, std::byte* data, const MessageSpec& spec,
          std::function<void()> finalizer);

  void wait(double timeout = 0) override;
  bool poll() override;
  void help(bool nobody_waits = false) override;
  int source() const override;
  int peer() const { return peer_; }  // of a recv from any source: once matched

  const MessageSpec& spec() const { return spec_; }
  OpInfo info() const { return {kind_, 0}; }
  bool sends() const { return kind_ == OpKind::send; }
  bool from_any() const { return spec_.peer == any_source; }
  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  uint64_t id() const { return id_; }  // in its channel, once posted
  bool claimed_elsewhere() const { return spec_.claim && spec_.claim->by() != Claim::By::nobody; }
  bool claim() const { return !spec_.claim || spec_.claim->take(Claim::By::host); }
  bool matches(int src, int tag) const { return tag == spec_.tag && comes_from(src); }
  bool comes_from(int src) const { return peer_ == src || peer_ == any_source; }
  std::chrono::steady_clock::time_point issued() const { return issued_; }
  // Times count from the issue of the message.
  WaitScope scope(double timeout) const;

  // What happens to it on its way (send_recv.h), under the lock of its SendRecv but for end().
  void posted(uint64_t id) { id_ = id; }
  void leave_to_receiver() { passive_ = true; }  // it can complete it without this rank
  void take_back() { passive_ = false; }  // it cannot
  bool passive() const { return passive_; }
  void matched(int src) {
    peer_ = src;
    traced_.matched();
  }
  void entrust(Trust trust) { trust_ = trust; }
  Trust trust() const { return trust_; }
  void end(std::exception_ptr error);

 private:
  // A recv that waits on the wire, too, is told of there (hosts/remote_message.h).
  bool told() const { return !spec_.claim; }

  SendRecv& owner_;
  const OpKind kind_;
  const MessageSpec spec_;
  const size_t nbytes_;
  std::byte* const data_;
  bool helped_ = false;
  bool passive_ = false;
  Trust trust_ = Trust::none;
  std::atomic<int> peer_;
  uint64_t id_ = 0;
  const std::chrono::steady_clock::time_point issued_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point next_look_ = issued_;
  TracedMessage traced_;
};

using MessagePtr = std::shared_ptr<Message>;

// What the parts of a SendRecv share. Written under its lock; the counts are read without it.
class Tally {
 public:
  void begin() { add(active, 1); }
  void entrust(Message& message, Trust trust);
  void end(MessagePtr message, std::exception_ptr error);
  // The next message that has ended. Its callbacks run once no lock is held.
  bool take(MessagePtr& message, std::exception_ptr& error);
  // The error of an eager message, whose send is complete: send_recv.h, [Note: eager messages].
  void defer(std::exception_ptr error) { deferred_errors_.push_back(std::move(error)); }
  std::exception_ptr take_deferred_error();  // null: there is none

  std::atomic<int> active{0};  // unfinished, or ended and not yet taken
  std::atomic<int> lent{0}, given{0};
  std::atomic<int> debts{0};  // acknowledgements that wait for room
  static void add(std::atomic<int>& count, int n) { count.fetch_add(n, std::memory_order_relaxed); }

 private:
  std::deque<std::pair<MessagePtr, std::exception_ptr>> ended_;
  std::deque<std::exception_ptr> deferred_errors_;
};

// What the peer of a message has.
struct Other {
  size_t count;
  DType dtype;
};
// What is wrong with a message whose peer, `name`, has another count or dtype.
std::string difference(const MessageSpec& mine, const std::string& name, size_t count, DType dtype);
// The error of such a message; `more` is appended to its text.
std::exception_ptr mismatch(const Transport& transport, OpKind kind, const MessageSpec& mine, int peer,
                            const Other& other, const char* more = "");

}  // namespace pycomm
