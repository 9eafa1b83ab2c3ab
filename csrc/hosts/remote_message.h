// remote_message.h -- one message under way whose peer is, or may be, on another host; and what the links of
// a rank share: recvs that wait for a message, and messages that have ended.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>

#include "../collectives/message.h"
#include "../collectives/traced_message.h"

namespace pycomm {

class AcrossMessages;

class RemoteMessage final : public MessageWork, public std::enable_shared_from_this<RemoteMessage> {
 public:
  RemoteMessage(AcrossMessages& owner, OpKind kind, std::byte* data, const MessageSpec& spec,
                std::function<void()> finalizer);

  void wait(double timeout = 0) override;
  bool poll() override;
  void help(bool nobody_waits = false) override;
  int source() const override { return peer_; }

  const MessageSpec& spec() const { return spec_; }
  OpInfo info() const { return {kind_, 0}; }
  bool from_any() const { return spec_.peer == any_source; }
  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  uint64_t id() const { return id_; }  // of a send, on its link
  void posted(uint64_t id) { id_ = id; }
  bool wants(int src, int tag) const { return tag == spec_.tag && (peer_ == src || peer_ == any_source); }
  bool claim() const { return !spec_.claim || spec_.claim->take(Claim::By::wire); }
  void matched(int src) {
    peer_ = src;
    traced_.matched();
  }
  WaitScope scope(double timeout) const;  // times count from the issue of the message

  const MessagePtr& half() const { return half_; }
  void set_half(MessagePtr half) { half_ = std::move(half); }
  void end(std::exception_ptr error) {
    over_.store(true, std::memory_order_release);
    traced_.ended(id_, peer_, error != nullptr);
    settle(std::move(error));
  }

  // Under the lock of its mailbox.
  bool given = false;  // nobody waits for it
  bool over() const { return over_.load(std::memory_order_acquire); }  // it has ended, settled or not
  void note_over() { over_.store(true, std::memory_order_release); }

 private:
  AcrossMessages& owner_;
  const OpKind kind_;
  const MessageSpec spec_;
  const size_t nbytes_;
  std::byte* const data_;
  MessagePtr half_;  // [Note: one winner], messages.h
  std::atomic<int> peer_;
  std::atomic<bool> over_{false};
  uint64_t id_ = 0;
  const std::chrono::steady_clock::time_point issued_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point next_look_ = issued_;
  TracedMessage traced_;
};
using RemotePtr = std::shared_ptr<RemoteMessage>;

// But for counts, used with its lock held.
class Mailbox {
 public:
  explicit Mailbox(Transport& transport) : transport_(transport) {}

  std::mutex mutex;
  void add(RemotePtr recv) { recvs_.push_back(std::move(recv)); }
  RemotePtr take(int src, int tag);  // the first recv that wants this message, or nullptr
  void forget(const RemotePtr& recv);
  void give_up(const std::exception_ptr& error);  // ends all recvs that have no message

  void give(RemoteMessage& message);
  void end(RemotePtr message, std::exception_ptr error);  // to be settled by whoever comes first
  void note_over(RemoteMessage& message);
  bool take_ended(RemotePtr& message, std::exception_ptr& error);

  int ended() const { return num_ended_.load(std::memory_order_acquire); }
  int given() const { return num_given_.load(std::memory_order_relaxed); }
  void wake();  // whoever settles; without the lock

 private:
  Transport& transport_;
  std::deque<RemotePtr> recvs_;  // in order
  std::deque<std::pair<RemotePtr, std::exception_ptr>> ended_;
  std::atomic<int> num_ended_{0}, num_given_{0};
};

}  // namespace pycomm
