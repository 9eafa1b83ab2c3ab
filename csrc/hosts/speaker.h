// speaker.h -- what the leaders of the hosts tell each other while a group lives.
//
// Each leader has a connection of its own to every other leader, apart from the data, on which words of one
// size travel:
//   alive     every second; a host that has not been heard for `host_timeout` is lost
//   broken    the group is broken on my host, and why: the other hosts raise the same
//   asks      an operation is overdue here: which ranks are furthest behind?
//   answers   which of my host are, and at which operation
//   arrives   a rank of my host is in a monitored barrier (communicator/monitored_barrier.h), to host 0
//   withdraws its time is up, to host 0
//   verdict   what became of it, from host 0
//   closed    a rank of my host has closed the group (board.h), and its last operation; if it is the leader,
//             nothing follows
// One thread for each other leader receives, and one speaks: it also looks at the lives of this host's ranks,
// for nobody else does while they all wait for the wire. A connection that ends without `closed` is a leader
// that died. When a leader has closed the group, its host has no speaker: what its other ranks do then is
// seen on their own connections.
//
// Who has not come to an overdue operation is known to no rank that waits for it alone: a leader whose
// message does not come may itself wait for a rank of its host. So the speaker of an overdue rank asks all
// hosts, and names those ranks that have come to the earliest operation of all.
//
// A leader that was stopped itself has heard nobody meanwhile; so silence counts only while this thread runs.
// Its own host is not told what the others make of its silence: each look leaves a pulse on the board.
//
// [Note: the reason goes first] A leader that raises an error often ends by it, and its connections end with
// it. Had the other hosts not heard why, they would name the leader. So a leader that is about to raise tells
// them, and waits until that is on its way (Health::set_before_raising).
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "board.h"
#include "placement.h"
#include "ticker.h"
#include "wire.h"

namespace pycomm {

class Speaker {
 public:
  // All of it outlives the speaker. `host`: this one.
  Speaker(const Placement& placement, int host, Wire& wire, Transport& transport, Board& board,
          Ticker& ticker);
  ~Speaker();
  Speaker(const Speaker&) = delete;

  void leave();  // tells that this rank closes the group; once

 private:
  using Clock = std::chrono::steady_clock;
  enum class Kind : uint32_t { alive, broken, closed, asks, answers, arrives, withdraws, verdict };
  struct Behind {  // the ranks, of a host or of all, that have come to the earliest operation
    uint64_t sequence = ~uint64_t{0};
    std::vector<int> ranks;
  };
  struct Word {
    Kind kind = Kind::alive;
    uint32_t error = 0;
    int32_t rank = -1;
    uint32_t op = 0;
    uint64_t sequence = 0;
    char text[360] = {};
  };
  struct Said {
    Word word;
    TicketPtr ticket;
  };
  using SaidPtr = std::shared_ptr<Said>;
  struct Peer {  // the leader of another host
    std::atomic<Clock::rep> heard{0};
    std::atomic<bool> gone{false};
    std::deque<SaidPtr> said;  // under the lock
    uint64_t answered = 0;  // the last operation asked for that it answered, under the lock
    Behind behind;  // and how
    TicketPtr hears;  // set before the thread starts and by it, under the lock
    std::thread thread;
  };

  void end();
  void speak();
  void look_at_host();
  void tell_reason();  // before it is raised here
  void await(int h, Said& said, Clock::time_point limit);  // without the lock
  void look_at_others(Clock::duration since_last_look);
  Clock::duration silence_of(int h) const;
  void answer(int h, uint64_t sequence);
  void take_answer(int h, const Word& word);
  struct ToldBarrier {  // of a rank: the words of its line that the other host knows
    uint64_t arrival = 0, withdrawn = 0, verdict = 0;
  };
  bool take_of_barrier(const Word& word);
  Behind behind_here() const;
  // With the lock held:
  bool relay_barriers();  // true: one is going on
  void relay_of_rank(int rank, BarrierLine& line);
  void answer_withdrawal(int rank, BarrierLine& line);
  void ask_about_overdue();
  void say(const Word& word);  // to all
  void say(int h, const Word& word);
  void hear(int h);
  void take(int h, const Word& word);
  void miss(int h, const std::string& what);
  std::string ranks_of(int h) const;

  const Placement& placement_;
  const int host_;
  Wire& wire_;
  Transport& transport_;
  Board& board_;
  Ticker& ticker_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by host, null for this one
  std::vector<bool> closed_;  // of this host's ranks, as told
  std::vector<ToldBarrier> told_barrier_;  // by rank
  std::atomic<bool> heard_broken_{false};
  bool told_broken_ = false;
  std::vector<std::pair<int, SaidPtr>> reasons_;  // told, and not awaited yet; with the hosts
  uint64_t asked_ = 0;  // the last operation asked for
  Clock::time_point answers_until_{};
  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> stop_{false};
  bool left_ = false;
  Clock::time_point next_alive_{};
  std::thread thread_;
};

}  // namespace pycomm
