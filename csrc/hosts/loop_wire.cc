// loop_wire.cc -- see loop_wire.h.
#include "loop_wire.h"

#include <algorithm>
#include <cstring>

namespace pycomm {

class LoopTicket final : public Ticket {
 public:
  LoopTicket(std::shared_ptr<LoopNetwork> network, int src, int dst, uint32_t tag, std::byte* data,
             size_t nbytes)
      : network(std::move(network)), src(src), dst(dst), tag(tag), data(data), nbytes(nbytes) {}
  ~LoopTicket() override { network->withdraw(*this); }

  bool wait() override {
    std::unique_lock lock(network->mutex_);
    changed.wait(lock, [this] { return done || nudged || !error.empty(); });
    if (!done && !error.empty()) throw WireError(error);
    nudged = false;
    return done;
  }
  void nudge() override {
    {
      std::lock_guard lock(network->mutex_);
      nudged = true;
    }
    changed.notify_all();
  }

  const std::shared_ptr<LoopNetwork> network;
  const int src, dst;
  const uint32_t tag;
  std::byte* const data;
  const size_t nbytes;
  // Under the network's lock.
  bool done = false, nudged = false;
  std::string error;
  std::condition_variable changed;
};

class LoopWire final : public Wire {
 public:
  LoopWire(std::shared_ptr<LoopNetwork> network, int rank) : network_(std::move(network)), rank_(rank) {}
  ~LoopWire() override { network_->end(rank_); }

  TicketPtr send(int dst, uint32_t tag, const std::byte* data, size_t nbytes) override {
    return post(rank_, dst, tag, const_cast<std::byte*>(data), nbytes, true);
  }
  TicketPtr recv(int src, uint32_t tag, std::byte* data, size_t nbytes) override {
    return post(src, rank_, tag, data, nbytes, false);
  }

 private:
  TicketPtr post(int src, int dst, uint32_t tag, std::byte* data, size_t nbytes, bool sends) {
    auto ticket = std::make_unique<LoopTicket>(network_, src, dst, tag, data, nbytes);
    network_->post(*ticket, sends);
    return ticket;
  }

  const std::shared_ptr<LoopNetwork> network_;
  const int rank_;
};

LoopNetwork::LoopNetwork(int size, int max_delay_us, uint64_t seed)
    : size_(size), max_delay_us_(max_delay_us), random_(seed | 1), lost_(size), ended_(size) {
  if (max_delay_us > 0) thread_ = std::thread([this] { loop(); });
}

LoopNetwork::~LoopNetwork() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<LoopNetwork> LoopNetwork::named(const std::string& name, int size, int max_delay_us) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<LoopNetwork>> networks;
  std::lock_guard lock(mutex);
  std::erase_if(networks, [](const auto& each) { return each.second.expired(); });
  auto network = networks[name].lock();
  if (!network)
    networks[name] = network =
        std::make_shared<LoopNetwork>(size, max_delay_us, std::hash<std::string>()(name));
  return network;
}

std::shared_ptr<Wire> LoopNetwork::wire(int rank) {
  return std::make_shared<LoopWire>(shared_from_this(), rank);
}

void LoopNetwork::lose(int rank, bool lost) {
  std::lock_guard lock(mutex_);
  lost_[rank] = lost;
  for (const auto& [key, line] : lines_) {
    const auto [src, dst, tag] = key;
    if (!lost && (src == rank || dst == rank)) match(src, dst, tag);
  }
}

void LoopNetwork::end(int rank) {
  std::lock_guard lock(mutex_);
  ended_[rank] = true;
  for (auto& [key, line] : lines_) {
    if (std::get<0>(key) != rank && std::get<1>(key) != rank) continue;
    for (auto* queue : {&line.sends, &line.recvs})
      for (LoopTicket* ticket : *queue) {
        ticket->error = "Connection closed by peer";
        ticket->changed.notify_all();
      }
  }
}

void LoopNetwork::post(LoopTicket& ticket, bool sends) {
  std::lock_guard lock(mutex_);
  if (ended_[ticket.src] || ended_[ticket.dst]) throw WireError("Connection closed by peer");
  Line& line = lines_[{ticket.src, ticket.dst, ticket.tag}];
  (sends ? line.sends : line.recvs).push_back(&ticket);
  match(ticket.src, ticket.dst, ticket.tag);
}

// A message stays in its line until it has arrived, so that its ticket can be withdrawn.
void LoopNetwork::match(int src, int dst, uint32_t tag) {
  Line& line = lines_[{src, dst, tag}];
  if (lost_[src] || lost_[dst] || line.moving) return;
  while (!line.sends.empty() && !line.recvs.empty()) {
    LoopTicket *send = line.sends.front(), *recv = line.recvs.front();
    if (max_delay_us_ == 0) {
      deliver(*send, *recv);
      line.sends.pop_front();
      line.recvs.pop_front();
      continue;
    }
    random_ = random_ * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto delay = std::chrono::microseconds((random_ >> 33) % max_delay_us_);
    arrivals_.push_back({Clock::now() + delay, number_++, send, recv});
    std::push_heap(arrivals_.begin(), arrivals_.end());
    changed_.notify_all();
    line.moving = true;
    return;  // the next of this line goes when this one has arrived
  }
}

void LoopNetwork::deliver(LoopTicket& send, LoopTicket& recv) {
  if (send.nbytes != recv.nbytes) {
    send.error = recv.error = "a message of " + std::to_string(send.nbytes) + " bytes met a receive of " +
                              std::to_string(recv.nbytes);
  } else {
    std::memcpy(recv.data, send.data, send.nbytes);
    send.done = recv.done = true;
  }
  send.changed.notify_all();
  recv.changed.notify_all();
}

void LoopNetwork::loop() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (arrivals_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const Arrival next = arrivals_.front();
    if (Clock::now() < next.at) {
      changed_.wait_until(lock, next.at);
      continue;
    }
    std::pop_heap(arrivals_.begin(), arrivals_.end());
    arrivals_.pop_back();
    if (!next.send || !next.recv) continue;
    const auto [src, dst, tag] = std::tuple(next.send->src, next.send->dst, next.send->tag);
    Line& line = lines_[{src, dst, tag}];
    line.moving = false;
    if (lost_[src] || lost_[dst]) continue;
    deliver(*next.send, *next.recv);
    line.sends.pop_front();
    line.recvs.pop_front();
    match(src, dst, tag);
  }
}

void LoopNetwork::withdraw(LoopTicket& ticket) {
  std::lock_guard lock(mutex_);
  const auto found = lines_.find({ticket.src, ticket.dst, ticket.tag});
  if (found == lines_.end()) return;
  for (Arrival& arrival : arrivals_)
    if (arrival.send == &ticket || arrival.recv == &ticket) {
      arrival.send = arrival.recv = nullptr;
      found->second.moving = false;
    }
  std::erase(found->second.sends, &ticket);
  std::erase(found->second.recvs, &ticket);
  if (found->second.sends.empty() && found->second.recvs.empty()) lines_.erase(found);
}

}  // namespace pycomm
