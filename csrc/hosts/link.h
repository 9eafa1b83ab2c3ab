// link.h -- the messages between this rank and one on another host: frames, payloads, and the thread that
// takes what comes. See messages.h.
#pragma once

#include <array>
#include <list>
#include <thread>

#include "across.h"
#include "remote_message.h"

namespace pycomm {

inline constexpr size_t frame_payload = 960;  // bytes of a message that travel with its header

struct Frame {
  enum class Kind : uint32_t { message, answer, sent, taken, received, farewell };
  Kind kind = Kind::received;
  int32_t tag = 0;
  uint64_t id = 0;     // of the message, on this link and in its direction
  uint64_t count = 0;  // of the message; answer: of the recv
  uint32_t dtype = 0;
  uint32_t agrees = 0;    // answer
  uint64_t received = 0;  // frames that whoever sends this one has got from its peer
  uint64_t unused[3] = {};
  std::byte payload[frame_payload] = {};
};
static_assert(sizeof(Frame) == 1024);

// Its methods are called with the lock of the mailbox held, unless something else is said.
class Link {
 public:
  Link(Across& across, Mailbox& mailbox, int peer) : across_(across), mailbox_(mailbox), peer_(peer) {}
  ~Link() { stop(); }
  Link(const Link&) = delete;

  void start();  // takes what comes from now on
  void send(const RemotePtr& message);
  bool offer(const RemotePtr& recv);  // what was put aside; true: it has its message
  void say_farewell();
  // Without the lock: until the peer has it, if it is known to be there.
  void await_farewell(std::chrono::steady_clock::time_point limit);
  void stop();  // without the lock: the thread has ended afterwards
  void give_up(const std::exception_ptr& error);  // behind stop(): ends all messages that are unfinished

  bool left() const { return left_.load(std::memory_order_acquire); }  // the peer, and nothing follows
  // Since when there is no connection, and why.
  bool lost(std::chrono::steady_clock::time_point& since, std::string& why) const;
  bool is_this_thread() const { return id_.load() == std::this_thread::get_id(); }
  std::chrono::steady_clock::time_point closed_seen{};  // when the peer's end was first noticed elsewhere

 private:
  struct Payload {
    RemotePtr message;
    uint64_t id;
    TicketPtr ticket;
  };
  struct Said {
    std::unique_ptr<Frame> frame;
    TicketPtr ticket;
  };

  void run();
  bool land(Ticket& ticket);  // without the lock; false: stopped
  bool take(const Frame& frame);  // without the lock; false: nothing follows, or stopped
  bool confirm(uint64_t received);
  void take_message(const Frame& frame);
  void take_answer(const Frame& frame);
  bool end_payload(std::deque<Payload>& payloads, const Frame& frame);
  void accept(const Frame& frame, const RemotePtr& recv);
  void post(Frame frame);
  Said under_way(Frame frame);
  void note_lost(const std::string& why);
  std::exception_ptr mismatch(const RemoteMessage& mine, const Frame& other) const;
  [[noreturn]] void confused(const Frame& frame) const;

  Across& across_;
  Mailbox& mailbox_;
  const int peer_;
  uint64_t ids_ = 0, received_ = 0, told_ = 0, confirmed_ = 0;
  std::deque<Said> said_;  // frames that the peer may not have yet
  Said farewell_;
  std::deque<RemotePtr> unanswered_;
  std::deque<Payload> outgoing_, incoming_;  // in the order of their answers
  std::list<std::unique_ptr<Frame>> aside_;  // messages without a recv, in order
  bool lost_ = false;
  std::chrono::steady_clock::time_point lost_since_{};
  std::string why_;
  Ticket* current_ = nullptr;  // that the thread waits for
  std::atomic<bool> left_{false}, stop_{false};
  std::atomic<std::thread::id> id_{};
  std::thread thread_;
};

}  // namespace pycomm
