// link.cc -- see link.h.
#include "link.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <system_error>

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

// Collectives have the tags below (operation.cc).
constexpr uint32_t frames_tag = 1 << 22, payloads_tag = frames_tag + 1;
constexpr uint64_t tell_after = 64;  // frames, if there was nothing else to say

}  // namespace

void Link::start() {
  if (thread_.joinable() || stop_.load() || left_.load() || lost_) return;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    throw std::runtime_error(across_.transport().where({}) +
                             "the system refuses another thread, and messages to and from other hosts need "
                             "one for each rank there. Raise the limit of threads (ulimit -u, pids.max of "
                             "the container).");
  }
  ::pthread_setname_np(thread_.native_handle(), "pycomm-link");
}

// --- what this rank does

void Link::send(const RemotePtr& message) {
  start();
  const MessageSpec& spec = message->spec();
  message->posted(++ids_);
  Frame frame;
  frame.kind = Frame::Kind::message;
  frame.tag = spec.tag;
  frame.id = ids_;
  frame.count = spec.count;
  frame.dtype = static_cast<uint32_t>(spec.dtype);
  if (message->nbytes() && message->nbytes() <= frame_payload)
    std::memcpy(frame.payload, message->data(), message->nbytes());
  unanswered_.push_back(message);
  post(std::move(frame));
}

bool Link::offer(const RemotePtr& recv) {
  const auto found = std::find_if(aside_.begin(), aside_.end(),
                                  [&](const auto& frame) { return recv->wants(peer_, frame->tag); });
  if (found == aside_.end()) return false;
  const std::unique_ptr<Frame> frame = std::move(*found);
  aside_.erase(found);
  (void)recv->claim();  // nobody else knows of it yet
  recv->matched(peer_);
  accept(*frame, recv);
  return true;
}

void Link::accept(const Frame& frame, const RemotePtr& recv) {
  Frame answer;
  answer.kind = Frame::Kind::answer;
  answer.id = frame.id;
  answer.count = recv->spec().count;
  answer.dtype = static_cast<uint32_t>(recv->spec().dtype);
  answer.agrees = answer.count == frame.count && answer.dtype == frame.dtype;
  if (answer.agrees && recv->nbytes() > frame_payload) {
    incoming_.push_back({recv, frame.id, nullptr});
    try {
      incoming_.back().ticket = across_.wire().recv(peer_, payloads_tag, recv->data(), recv->nbytes());
    } catch (const WireError& error) {
      return note_lost(error.what());
    }
    return post(std::move(answer));
  }
  if (answer.agrees && recv->nbytes()) std::memcpy(recv->data(), frame.payload, recv->nbytes());
  mailbox_.end(recv, answer.agrees ? nullptr : mismatch(*recv, frame));  // before its sender knows
  post(std::move(answer));
}

Link::Said Link::under_way(Frame frame) {
  frame.received = told_ = received_;
  Said said{std::make_unique<Frame>(std::move(frame)), nullptr};
  said.ticket =
      across_.wire().send(peer_, frames_tag, reinterpret_cast<std::byte*>(said.frame.get()), sizeof(Frame));
  return said;
}

void Link::post(Frame frame) {
  if (lost_) return;
  try {
    said_.push_back(under_way(std::move(frame)));
  } catch (const WireError& error) {
    note_lost(error.what());
  }
}

void Link::note_lost(const std::string& why) {
  if (std::exchange(lost_, true)) return;
  why_ = why;
  lost_since_ = Clock::now();
}

bool Link::lost(Clock::time_point& since, std::string& why) const {
  since = lost_since_;
  why = why_;
  return lost_;
}

std::exception_ptr Link::mismatch(const RemoteMessage& mine, const Frame& other) const {
  const Placement& placement = across_.placement();
  const std::string what =
      difference(mine.spec(), placement.name(peer_), other.count, static_cast<DType>(other.dtype));
  return std::make_exception_ptr(CommError(ErrorKind::mismatch, across_.transport().where(mine.info()) + what,
                                           across_.rank(), placement.world_size(), mine.info(), peer_));
}

// --- what comes

void Link::run() {
  id_.store(std::this_thread::get_id());
  std::array<Frame, 2> frames;
  std::array<TicketPtr, 2> tickets;
  auto expect = [&](int i) {
    tickets[i] =
        across_.wire().recv(peer_, frames_tag, reinterpret_cast<std::byte*>(&frames[i]), sizeof(Frame));
  };
  try {
    expect(0);
    for (int i = 0;; i ^= 1) {
      if (!land(*tickets[i])) return;
      tickets[i].reset();
      if (frames[i].kind != Frame::Kind::farewell) expect(i ^ 1);
      if (!take(frames[i])) return;
    }
  } catch (const WireError& error) {
    std::lock_guard lock(mailbox_.mutex);
    note_lost(error.what());
  } catch (const std::exception& error) {
    across_.transport().abort(std::string("its messages failed: ") + error.what());
  }
  mailbox_.wake();
}

bool Link::land(Ticket& ticket) {
  {
    std::lock_guard lock(mailbox_.mutex);
    if (stop_.load()) return false;
    current_ = &ticket;
  }
  struct Clear {
    Link& link;
    ~Clear() {
      std::lock_guard lock(link.mailbox_.mutex);
      link.current_ = nullptr;
    }
  } clear{*this};
  while (!ticket.wait())
    if (stop_.load()) return false;
  return true;
}

bool Link::take(const Frame& frame) {
  using Kind = Frame::Kind;
  if (!confirm(frame.received)) return false;
  bool goes_on = true;
  if (frame.kind == Kind::sent) goes_on = end_payload(incoming_, frame);
  if (frame.kind == Kind::taken) goes_on = end_payload(outgoing_, frame);
  {
    std::lock_guard lock(mailbox_.mutex);
    ++received_;
    if (frame.kind == Kind::message) take_message(frame);
    if (frame.kind == Kind::answer) take_answer(frame);
    if (received_ - told_ >= tell_after) post({});
  }
  if (frame.kind == Kind::farewell) {
    left_.store(true, std::memory_order_release);
    goes_on = false;
  }
  mailbox_.wake();
  return goes_on;
}

// The peer has got so many frames: their memory is free.
bool Link::confirm(uint64_t received) {
  for (;;) {
    Said said;
    {
      std::lock_guard lock(mailbox_.mutex);
      if (confirmed_ == received || said_.empty()) return true;
      said = std::move(said_.front());
      said_.pop_front();
      ++confirmed_;
    }
    if (!land(*said.ticket)) return false;
  }
}

void Link::take_message(const Frame& frame) {
  if (const RemotePtr recv = mailbox_.take(peer_, frame.tag)) accept(frame, recv);
  else aside_.push_back(std::make_unique<Frame>(frame));
}

void Link::take_answer(const Frame& frame) {
  const auto found = std::find_if(unanswered_.begin(), unanswered_.end(),
                                  [&](const RemotePtr& message) { return message->id() == frame.id; });
  if (found == unanswered_.end()) confused(frame);
  const RemotePtr message = *found;
  unanswered_.erase(found);
  message->matched(peer_);
  if (!frame.agrees) return mailbox_.end(message, mismatch(*message, frame));
  if (message->nbytes() <= frame_payload) return mailbox_.end(message, nullptr);
  outgoing_.push_back({message, frame.id, nullptr});
  try {
    outgoing_.back().ticket = across_.wire().send(peer_, payloads_tag, message->data(), message->nbytes());
  } catch (const WireError& error) {
    return note_lost(error.what());
  }
  Frame sent;
  sent.kind = Frame::Kind::sent;
  sent.id = frame.id;
  post(std::move(sent));
}

// See [Note: no deadlock among links]. Without the lock while it waits: only this thread takes payloads out.
bool Link::end_payload(std::deque<Payload>& payloads, const Frame& frame) {
  Ticket* ticket = nullptr;
  {
    std::lock_guard lock(mailbox_.mutex);
    if (lost_) return false;
    if (payloads.empty() || payloads.front().id != frame.id) confused(frame);
    ticket = payloads.front().ticket.get();
  }
  if (!land(*ticket)) return false;
  std::lock_guard lock(mailbox_.mutex);
  mailbox_.end(payloads.front().message, nullptr);
  payloads.pop_front();
  if (frame.kind == Frame::Kind::sent) {
    Frame taken;
    taken.kind = Frame::Kind::taken;
    taken.id = frame.id;
    post(std::move(taken));
  }
  return true;
}

void Link::confused(const Frame& frame) const {
  throw std::logic_error("pycomm: " + across_.placement().name(peer_) + " speaks of message " +
                         std::to_string(frame.id) + ", which is not under way");
}

// --- the end

void Link::say_farewell() {
  if (lost_ || left()) return;
  Frame frame;
  frame.kind = Frame::Kind::farewell;
  try {
    farewell_ = under_way(std::move(frame));
  } catch (const WireError& error) {
    note_lost(error.what());
  }
}

void Link::await_farewell(Clock::time_point limit) {
  {
    std::lock_guard lock(mailbox_.mutex);
    if (!farewell_.ticket || received_ == 0 || lost_) return;
  }
  const Ticker::Watched watched(across_.ticker(), *farewell_.ticket);
  try {
    while (!farewell_.ticket->wait() && !left() && Clock::now() < limit) continue;
  } catch (const WireError&) {
    // it is not there to hear it
  }
}

void Link::stop() {
  {
    std::lock_guard lock(mailbox_.mutex);
    stop_.store(true);
    if (current_) current_->nudge();
  }
  if (thread_.joinable()) thread_.join();
}

void Link::give_up(const std::exception_ptr& error) {
  for (auto* payloads : {&outgoing_, &incoming_})
    for (Payload& payload : *payloads) {
      payload.ticket.reset();
      mailbox_.end(std::move(payload.message), error);
    }
  outgoing_.clear();
  incoming_.clear();
  for (RemotePtr& message : unanswered_) mailbox_.end(std::move(message), error);
  unanswered_.clear();
  said_.clear();
  aside_.clear();
}

}  // namespace pycomm
