// monitored_barrier.cc -- see monitored_barrier.h.
#include "monitored_barrier.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "../transport/interrupt.h"
#include "communicator.h"

namespace pycomm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double tick = 0.01;  // seconds between looks at the peers' lives
constexpr double longest_verdict = 1.0;  // seconds; rank 0 has taken the arrival and is about to answer
constexpr OpInfo info{OpKind::barrier, 0};

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

class Round {
 public:
  Round(Communicator& comm, double timeout)
      : comm_(comm),
        transport_(comm.transport()),
        hosts_(comm.hosts_side()),
        board_(hosts_ ? hosts_->barrier_board() : BarrierBoard{}),
        rank_(comm.rank()),
        world_size_(comm.world_size()),
        timeout_(timeout),
        deadline_(after(std::min(timeout, 1e8))) {}
  // However the round ends: nobody may take this rank for present. A verdict that was on its way is ignored.
  ~Round() {
    if (call_ != 0) arrival(rank_).store(0, std::memory_order_release);
  }

  void begin() {
    transport_.check(info);
    comm_.help_queue();  // peers may need what was issued here before they come
    for (int p = 0; p < world_size_; ++p) {
      calls_before_.push_back(calls(p).load(std::memory_order_acquire));
      was_there_.push_back(arrival(p).load(std::memory_order_acquire) != 0);
    }
    call_ = calls_before_[rank_] + 1;
    calls(rank_).store(call_, std::memory_order_release);
    arrival(rank_).store(call_ * 2, std::memory_order_release);
    if (rank_ != 0) notify(0);
  }

  // True: all have come.
  bool lead() {
    auto all_there = [this] {
      for (int p = 1; p < world_size_; ++p)
        if (arrival(p).load(std::memory_order_acquire) == 0) return false;
      return true;
    };
    for (;;) {
      const bool complete = wait_until(all_there, deadline_, 1, world_size_);
      if (!complete) note_missing();
      if (!complete && hosts_) tell_missing();
      const std::vector<uint64_t> taken = take();
      const bool passed = std::none_of(taken.begin() + 1, taken.end(), [](uint64_t a) { return a == 0; });
      if (complete && !passed) {  // one has withdrawn meanwhile
        for (int p = 1; p < world_size_; ++p)
          if (taken[p]) arrival(p).store(taken[p], std::memory_order_release);
        continue;
      }
      for (int p = world_size_ - 1; p > 0; --p)  // a host's leader last: Speaker::relay_barriers
        if (taken[p]) answer(p, taken[p] + passed);
      return passed;
    }
  }

  bool follow() {
    auto answered = [this] { return verdict(rank_).load(std::memory_order_acquire) / 2 == call_; };
    bool in_time = wait_until(answered, deadline_, 0, 1);
    note_missing();
    if (!in_time && here(0) < 0) {
      board_.lines[rank_].withdrawn.store(call_, std::memory_order_release);
      in_time = wait_until(answered, after(transport_.host_timeout() + longest_verdict), 0, 1);
    } else if (!in_time) {
      const auto last = after(longest_verdict);
      do {
        uint64_t mine = call_ * 2;
        if (arrival(rank_).compare_exchange_strong(mine, 0)) return false;
      } while (!wait_until(answered, after(tick), 0, 1) && Clock::now() < last);
    }
    if (here(0) < 0 && in_time) hear_missing();  // else the words are of an earlier barrier
    return verdict(rank_).load(std::memory_order_acquire) == call_ * 2 + 1;
  }

  [[noreturn]] void fail(bool wait_all_ranks) const {
    std::ostringstream text;
    if (missing_.empty()) text << "rank 0 did not answer";  // it has counted this rank, then stopped
    else text << names(missing_) << " did not arrive";
    text << " within the timeout of " << timeout_ << " s; the group is still usable. "
         << gloos_sentence(wait_all_ranks);
    comm_.raise(ErrorKind::timeout, info, missing_.empty() ? -1 : missing_[0], text.str());
  }

  void blame(int peer) {
    if (missing_.empty() && peer >= 0) missing_ = {peer};
  }

  // As programs that were written for Gloo look for it.
  std::string gloos_sentence(bool wait_all_ranks) const {
    const std::string self = "Rank " + std::to_string(rank_);
    const std::string ms = std::to_string(std::llround(std::min(timeout_, 1e8) * 1e3)) + " ms";
    if (rank_ != 0)
      return self +
             " successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
             "rank 0";
    if (missing_.empty()) return "";
    if (timeout_ <= 0) return self + " timed out in monitoredBarrier after " + ms;
    if (wait_all_ranks && missing_.size() > 1)
      return "Ranks " + listed(missing_) + " failed to pass monitoredBarrier in " + ms;
    // Also with wait_all_ranks Gloo says "Ranks 1".
    return (wait_all_ranks ? "Ranks " : "Rank ") + std::to_string(missing_[0]) +
           " failed to pass monitoredBarrier in " + ms;
  }

 private:
  static Clock::time_point after(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  std::atomic<uint64_t>& calls(int p) const {
    return hosts_ ? board_.lines[p].calls : transport_.control(p).barrier_calls;
  }
  std::atomic<uint64_t>& arrival(int p) const {
    return hosts_ ? board_.lines[p].arrival : transport_.control(p).barrier_arrival;
  }
  std::atomic<uint64_t>& verdict(int p) const {
    return hosts_ ? board_.lines[p].verdict : transport_.control(p).barrier_verdict;
  }
  // Its number among the ranks of this host; -1: it is on another.
  int here(int p) const { return hosts_ ? hosts_->local(p) : p; }
  bool closed(int p) const { return hosts_ ? hosts_->closed(p) : transport_.peer_closed(p); }
  bool alive(int p) const { return here(p) < 0 || transport_.peer_alive(here(p)); }
  void notify(int p) {
    if (here(p) >= 0) transport_.notify(here(p));
  }
  std::string names(const std::vector<int>& ranks) const {
    if (!hosts_) return (ranks.size() > 1 ? "ranks " : "rank ") + listed(ranks);
    std::string text;
    for (int rank : ranks) text += (text.empty() ? "" : ", ") + hosts_->name(rank);
    return text;
  }

  // Rank 0 to ranks of other hosts, before its verdict.
  void tell_missing() {
    for (int i = 0; i * 64 < world_size_; ++i) {
      uint64_t bits = 0;
      for (int rank : missing_)
        if (rank / 64 == i) bits |= uint64_t{1} << rank % 64;
      board_.missing[i].store(bits, std::memory_order_relaxed);
    }
  }
  void hear_missing() {
    missing_.clear();
    for (int p = 0; p < world_size_; ++p)
      if (p != rank_ && (board_.missing[p / 64].load(std::memory_order_relaxed) >> p % 64 & 1))
        missing_.push_back(p);
  }

  // False: the time is up. Looks at the lives of ranks [first, last).
  template <class Ready>
  bool wait_until(const Ready& ready, Clock::time_point deadline, int first, int last) {
    for (int i = 0; i < spins_before_slow && !transport_.oversubscribed(); ++i) {
      if (ready()) return true;
      cpu_relax();
    }
    for (;;) {
      if (ready()) return true;
      if (interrupted()) transport_.abort(interrupted_text);
      transport_.check(info);
      if (hosts_) hosts_->look_at_lives(info);
      for (int p = first; p < last; ++p) look_at(p);
      if (here(0) < 0 && here(rank_) != 0) look_at(hosts_leader());
      if (comm_.background()) comm_.background()->progress();
      const std::chrono::duration<double> left = deadline - Clock::now();
      if (left.count() <= 0) return false;
      transport_.sleep_unless([&] { return ready() || transport_.broken(); }, std::min(tick, left.count()));
    }
  }

  // Whoever is in its call is alive and stays until it is answered or withdraws.
  void look_at(int p) {
    if (p == rank_ || (alive(p) && !closed(p))) return;
    if (rank_ != 0 && verdict(rank_).load(std::memory_order_acquire) / 2 == call_)
      return;  // rank 0 answered before it left, or this host's leader, through whom the answer comes
    missing_ = {p};
    const char* what =
        alive(p) ? " closed the group before it came to this operation" : " died (its process ended)";
    if (!hosts_) transport_.fail(ErrorKind::peer, info, p, "rank " + std::to_string(p) + what);
    transport_.mark_broken({ErrorKind::peer, info, p, hosts_->name(p) + what});
    transport_.check(info);
  }

  int hosts_leader() const {
    int p = 0;
    while (here(p) != 0) ++p;
    return p;
  }

  // By rank: the arrival that this rank has taken, 0 where there was none.
  std::vector<uint64_t> take() {
    std::vector<uint64_t> taken(world_size_, 0);
    for (int p = 1; p < world_size_; ++p) {
      uint64_t there = arrival(p).load(std::memory_order_acquire);
      if (there != 0 && arrival(p).compare_exchange_strong(there, there + 1)) taken[p] = there;
    }
    return taken;
  }

  void answer(int p, uint64_t verdict) {
    arrival(p).store(0, std::memory_order_release);
    this->verdict(p).store(verdict, std::memory_order_release);
    notify(p);
  }

  // Who has not been seen since this round began: others may have come and withdrawn already.
  void note_missing() {
    missing_.clear();
    std::vector<int> absent;
    for (int p = 0; p < world_size_; ++p) {
      if (p == rank_ || arrival(p).load(std::memory_order_acquire) != 0) continue;
      absent.push_back(p);
      const uint64_t calls_now = calls(p).load(std::memory_order_acquire);
      if (!was_there_[p] && calls_now == calls_before_[p]) missing_.push_back(p);
    }
    if (missing_.empty()) missing_ = absent;
  }

  Communicator& comm_;
  Transport& transport_;
  HostsSide* const hosts_;  // null: all ranks are on this host
  const BarrierBoard board_;
  const int rank_, world_size_;
  const double timeout_;
  const Clock::time_point deadline_;
  uint64_t call_ = 0;
  std::vector<uint64_t> calls_before_;
  std::vector<bool> was_there_;
  std::vector<int> missing_;
};

}  // namespace

void monitored_barrier(Communicator& comm, double timeout, bool wait_all_ranks) {
  if (comm.world_size() == 1) return comm.transport().check(info);
  Round round(comm, timeout);
  bool passed = false;
  try {
    round.begin();
    passed = comm.rank() == 0 ? round.lead() : round.follow();
  } catch (const CommError& error) {
    round.blame(error.peer);
    throw CommError(error.kind, error.what() + (" " + round.gloos_sentence(wait_all_ranks)), error.rank,
                    error.world_size, error.op, error.peer);
  }
  if (!passed) round.fail(wait_all_ranks);
}

}  // namespace pycomm
