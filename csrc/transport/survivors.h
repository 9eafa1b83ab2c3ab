// survivors.h -- how the ranks of a group that has lost some agree on who is left, without a store.
//
// Rounds, counted from 1 for each group. In a round every survivor
//
//   1  arrives       its word survivors_arrived = round
//   2  waits until everybody has arrived who is not dead, gone, left out or stopped
//   3  takes the verdict: one of them writes it (below): the members, or why there is no group
//   4  makes a new group with the other members (the caller; it may fail, or another may die meanwhile)
//   5  formed        its word survivors_formed = round, and waits until all members have formed
//
// One word in the header of the group, `survivors`, says how far they are: round, state, and who wrote the
// verdict, which lies in that rank's page (page_store.h).
//
//     over (round - 1) --> claimed --> members --> formed             the group is made; this one is done
//                             |           |
//                             |           +------> over (round)       one died in 4: all come to the next
//                             +------------------> failed (round)     somebody's time is up, or they differ
//
// A rank that gives up after the verdict claims, too: members --> claimed --> failed. If it dies before its
// own verdict is out, the others turn the word to over.
//
// Every arrow is a compare-and-exchange, so all see one outcome:
//   - Who claims and dies, or is stopped, before its verdict is out is seen so by the others, and one of them
//     claims anew. Its page counts for nothing until the word says members or failed.
//   - Who dies after the verdict names it a member has not formed: whoever sees that turns the word to over,
//     and all survivors, those too that had formed, arrive in the next round. A group that one rank takes for
//     made and another does not cannot be: formed is one word.
//   - Whose time is up claims as well, to write `failed`. If it comes too late to claim, it takes the
//   verdict.
//     So does who fails by itself in step 4; if the round is over then, in the next one.
//   - A rank that arrives late, because it was stopped, and finds itself no member, waits for formed (it is
//     left out: an error) or over (it takes part in the next round).
// Deaths are certain: record locks (memory/life.h) never call a living process dead. A stopped one (SIGSTOP,
// a debugger) lives; it is left out if it has been stopped for longer than patience and the processes can see
// each other's state. Everybody else who lives is waited for until the deadline, and then named.
//
// Cost: a look at n words per ring of the doorbell; the verdict of 8 ranks on one host takes well below 1 ms
// once all have arrived.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "page_store.h"

namespace pycomm {

class Survivors {
 public:
  // `exclude`: living ranks that are to be left out; all survivors pass the same. `exactly`: nobody else may
  // be missing. Throws std::invalid_argument.
  Survivors(std::shared_ptr<Transport> transport, std::vector<int> exclude, bool exactly, double timeout);

  // Steps 1 to 3: the members, ascending, with this rank. Throws CommError: of kind timeout with who did not
  // come, aborted where this rank was left out, mismatch.
  std::vector<int> agree();
  // Step 5; `made`: step 4 succeeded here. False: agree() again.
  bool form(bool made);
  // Instead of form(): this rank cannot go on, for a reason that is its own.
  void give_up(const std::string& why);

  uint64_t round() const { return round_; }
  double seconds_left() const;
  PageStore& store() { return store_; }

 private:
  enum class State : uint64_t { over, claimed, members, failed, formed };
  struct Word {
    uint64_t round;
    State state;
    int rank;  // who claims or has written the verdict
    uint64_t pack() const {
      return round << 24 | static_cast<uint64_t>(rank) << 8 | static_cast<uint64_t>(state);
    }
    static Word unpack(uint64_t word) {
      return {word >> 24, static_cast<State>(word & 0xff), static_cast<int>(word >> 8 & 0xffff)};
    }
    bool ended() const { return state == State::over || state == State::failed; }
  };
  enum class Presence { arrived, absent, dead, stopped, left, excluded };

  Word look() const { return Word::unpack(transport_->survivors().load(std::memory_order_acquire)); }
  bool turn(const Word& from, const Word& to);
  void arrive(uint64_t round);
  std::optional<std::vector<int>> outcome(const Word& word);
  std::optional<std::string> verdict_of(const Word& word) const;
  void decide(const Word& word);
  void say(const std::string& verdict);
  bool claim(const Word& word);
  std::string verdict(const std::vector<Presence>& seen) const;
  std::vector<Presence> presences();
  Presence presence(int peer);
  bool gone(int peer);
  bool stopped_for_long(int peer);
  std::string said_of_exclusion() const;
  bool in(const std::vector<int>& ranks, int rank) const;
  void sleep();
  [[noreturn]] void raise(ErrorKind kind, int peer, const std::string& text) const;
  [[noreturn]] void raise_failure(const std::string& verdict) const;

  using Clock = std::chrono::steady_clock;

  const std::shared_ptr<Transport> transport_;
  PageStore store_;
  const std::vector<int> exclude_;
  const bool exactly_;
  const double timeout_;
  const Clock::time_point deadline_;
  const int rank_, world_size_;
  uint64_t round_ = 0;
  std::vector<int> members_;
  std::vector<std::optional<Clock::time_point>> stopped_since_;  // by rank
};

}  // namespace pycomm
