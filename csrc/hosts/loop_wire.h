// loop_wire.h -- a wire between threads of one process: for ranks that are threads, and for tests, which can
// delay messages, lose them and end connections.
//
// As an engine over a network does, it moves a message when both sides have posted it, keeps the order of
// messages with one tag between two ranks, and no other. A message and a receive of different sizes, which
// would end the process elsewhere, are an error on both sides here.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <queue>
#include <string>
#include <thread>
#include <vector>

#include "wire.h"

namespace pycomm {

class LoopTicket;

// The network: what connects the wires of a group.
class LoopNetwork : public std::enable_shared_from_this<LoopNetwork> {
 public:
  // max_delay_us: messages arrive that late at most, drawn from `seed`, so that they overtake each other.
  explicit LoopNetwork(int size, int max_delay_us = 0, uint64_t seed = 1);
  ~LoopNetwork();

  // The network of this name, made by whoever asks first; it lives as long as one of its wires.
  static std::shared_ptr<LoopNetwork> named(const std::string& name, int size, int max_delay_us);
  std::shared_ptr<Wire> wire(int rank);
  // Nothing arrives at or comes from it, and nobody is told, until it is found again.
  void lose(int rank, bool lost);
  void end(int rank);  // its connections end: others see errors

 private:
  friend class LoopTicket;
  friend class LoopWire;
  using Clock = std::chrono::steady_clock;
  struct Line {  // from one rank to another, of one tag
    std::deque<LoopTicket*> sends, recvs;
    bool moving = false;  // the first of both are in arrivals_
  };
  struct Arrival {
    Clock::time_point at;
    uint64_t number;
    LoopTicket *send, *recv;
    bool operator<(const Arrival& other) const {
      return std::pair(other.at, other.number) < std::pair(at, number);
    }
  };

  void post(LoopTicket& ticket, bool sends);
  void withdraw(LoopTicket& ticket);
  void match(int src, int dst, uint32_t tag);
  void deliver(LoopTicket& send, LoopTicket& recv);
  void loop();

  const int size_, max_delay_us_;
  uint64_t random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::tuple<int, int, uint32_t>, Line> lines_;
  std::vector<Arrival> arrivals_;  // a heap
  std::vector<bool> lost_, ended_;
  uint64_t number_ = 0;
  bool stop_ = false;
  std::thread thread_;  // where there are delays
};

}  // namespace pycomm
