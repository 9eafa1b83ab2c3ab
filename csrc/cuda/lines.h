// lines.h -- the order of a group's operations.
//
// [Note: lines] Operations that use the same flags must run one after the other, on every rank in the same
// order. There is one line for collectives and one for each end of each message channel. An operation that
// enters another stream than the one before it in its line waits for it there by an event; so a group may be
// used from several streams, and the order of issue is the order of execution. Asynchronous operations go to
// a stream of the line. While a stream is being captured, events of other captures and of eager work cannot
// be waited for; then the order is the caller's business, as with any captured work. So a line remembers the
// last of either. A kernel of others that waits for peers in the group's places stands in the line of
// collectives, too.
//
// All of it is guarded by the group's lock (lock.h), which the caller holds.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "events.h"

namespace pycomm::cuda {

// For what runs in stream order a word says which operation of a line is under way: its sequence number and
// kind, 0 for none.
inline constexpr int busy_kind_bits = 4;

struct Line {
  int number = 0;  // of its busy word (host_words.h)
  Mark eager{}, captured{};  // the last outside of captures, and in the newest one
  Stream own = nullptr;  // of asynchronous operations
  uint64_t issued = 0;

  // For deadlines.h. What was last seen in stream order: the busy word, which peers have come, and since when
  // both are so.
  uint32_t busy = 0, arrived = 0;
  std::chrono::steady_clock::time_point since{};
  // Seconds, by busy word, of what has not ended outside of captures.
  std::deque<std::pair<uint32_t, double>> timeouts{};
};

class Lines {
 public:
  explicit Lines(int world_size) : world_size_(world_size) {}

  Line& collectives() { return collectives_; }
  Line& sending_to(int peer) { return of(sending_, peer, 1 + peer); }
  Line& receiving_from(int peer) { return of(receiving_, peer, 1 + world_size_ + peer); }

  std::vector<Line*> all() {
    std::vector<Line*> lines{&collectives_};
    for (auto& [peer, line] : sending_) lines.push_back(&line);
    for (auto& [peer, line] : receiving_) lines.push_back(&line);
    return lines;
  }

  // How far the lines have come outside of captures.
  std::vector<Mark> last_marks() {
    std::vector<Mark> marks;
    for (const Line* line : all())
      if (line->eager.event) marks.push_back(line->eager);
    return marks;
  }

  // Ends the streams and lets go of the events.
  void give_back(const Driver& driver) {
    for (const Line* line : all())
      if (line->own) driver.cuStreamDestroy(line->own);
    collectives_ = {};
    sending_.clear();
    receiving_.clear();
  }

 private:
  static Line& of(std::map<int, Line>& lines, int peer, int number) {
    return lines.try_emplace(peer, Line{number}).first->second;
  }

  const int world_size_;
  Line collectives_;
  std::map<int, Line> sending_, receiving_;
};

}  // namespace pycomm::cuda
