// reduce_scatter.cc -- reduce_scatter over hosts: for every other host, this host's ranks add up what they
// have for the ranks there, one part each in turn, and send the sum to the part's rank, which adds the hosts'
// sums in their order. (N - k) b bytes out of each host's link, instead of k (N - k) b without the sum
// inside. Long parts go in pieces: while one is on the wire, the next is added up.
#include <algorithm>
#include <array>

#include "collectives.h"

namespace pycomm::across {

namespace {

class Parts {
 public:
  explicit Parts(Operation& operation)
      : o_(operation), piece_(std::min(operation.segment() / 4 + 1, longest_part())) {
    const Placement& placement = o_.placement;
    std::vector<int> turns = o_.others();
    turns.push_back(o_.host);
    for (int h : turns)
      for (int first = 0; first < placement.size_of(h); first += o_.locals) rounds_.push_back({h, first});
    room_ = round_up(piece_ * o_.item, 64);
    slot_ = (rounds_.size() + placement.hosts()) * room_;
    memory_ = o_.group.memory(2 * slot_);
  }

  void run() {
    std::array<Flight, 2> flights{Flight(o_.group, o_.scope()), Flight(o_.group, o_.scope())};
    size_t before = 0;
    int slot = 0;
    for (size_t begin = 0; begin < longest_part() || begin == 0; begin += piece_, slot ^= 1) {
      post(flights[slot], slot, begin);
      if (begin) add(flights[slot ^ 1], slot ^ 1, before);
      before = begin;
    }
    add(flights[slot ^ 1], slot ^ 1, before);
  }

 private:
  struct Round {
    int host, first;  // for the ranks of `host` from its local rank `first` on, as many as there are here
  };

  size_t longest_part() const {
    size_t longest = 1;
    for (const Part& part : o_.op.in_parts) longest = std::max(longest, part.count);
    return longest;
  }
  size_t count_of(int rank, size_t begin) const {
    const size_t count = o_.op.in_parts[rank].count;
    return begin < count ? std::min(piece_, count - begin) : 0;
  }
  std::byte* sum(int slot, size_t round) const { return memory_ + slot * slot_ + round * room_; }
  std::byte* from(int slot, int host) const { return sum(slot, rounds_.size() + host); }

  void post(Flight& flight, int slot, size_t begin) {
    const Placement& placement = o_.placement;
    const size_t own = count_of(o_.group.rank(), begin);
    for (int h = 0; h < placement.hosts(); ++h)
      if (h != o_.host)
        o_.recv(flight, placement.ranks[h][o_.local % placement.size_of(h)], from(slot, h), own);
    for (size_t r = 0; r < rounds_.size(); ++r) {
      const auto [host, first] = rounds_[r];
      Op step = o_.reduction_inside(OpKind::reduce_scatter);
      for (int l = 0; l < o_.locals; ++l) {
        const bool there = first + l < placement.size_of(host);
        const int rank = there ? placement.ranks[host][first + l] : 0;
        const size_t count = there ? count_of(rank, begin) : 0;
        step.in_parts.push_back({count ? o_.at(o_.op.in_parts[rank].data, begin) : nullptr, count});
        step.count += count;
      }
      step.out = sum(slot, r);
      const size_t count = step.in_parts[o_.local].count;
      o_.inside(std::move(step));
      if (host != o_.host && count)
        o_.send(flight, placement.ranks[host][first + o_.local], sum(slot, r), count);
    }
  }

  void add(Flight& flight, int slot, size_t begin) {
    flight.land();
    std::vector<const void*> sources;
    for (int h = 0; h < o_.placement.hosts(); ++h) sources.push_back(from(slot, h));
    for (size_t r = 0; r < rounds_.size(); ++r)
      if (rounds_[r].host == o_.host) sources[o_.host] = sum(slot, r);
    const size_t count = count_of(o_.group.rank(), begin);
    if (count) o_.sum_hosts(sources, o_.at(o_.op.out, begin), count);
  }

  Operation& o_;
  const size_t piece_;
  std::vector<Round> rounds_;
  size_t room_, slot_;
  std::byte* memory_;
};

}  // namespace

// In place (the result in this rank's own part) the input of later pieces is not touched: an output lies
// where the own part's piece was, which is summed first.
void reduce_scatter(Operation& o, Agreement& agreement) {
  agreement.begin();
  agreement.conclude();
  Parts(o).run();
}

}  // namespace pycomm::across
