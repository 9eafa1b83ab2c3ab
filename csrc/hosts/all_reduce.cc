// all_reduce.cc -- all_reduce over hosts.
//
// The buffer is cut into segments, which move through three stages, one behind the other: while the slices of
// one segment are on the wire, the next is reduced in shared memory and the one before is gathered.
//
// Two hosts exchange their sums: rank l of a host has slice l of its host's sum, sends it to whoever has that
// part on the other host ([Note: cuts]), adds what comes, and both hosts have the total. n bytes on each link
// in each direction, one message deep.
//
//   host 0   slice 0  a0 |          host 1   slice 0  b0       a0 + b0 on both, by ranks 0 of both hosts
//            slice 1  a1 | <------>          slice 1  b1       a1 + b1 on both, by ranks 1
//
// With more hosts each owns a part of the segment: every host reduces all parts inside, sends each part to
// its owner, who adds in the order of hosts, and sends the total back to all. 2 (H-1)/H n bytes on each link.
//
//   host h   for every part g: sum of this host -> slices -> host g adds -> slices of the total -> all hosts
//
// Sources: Horovod's hierarchical all-reduce (Sergeev and Del Balso, 2018) for the levels; Thakur et al.,
// IJHPCA 2005, for reduce-scatter and all-gather between hosts. In place: a segment's output is written only
// when its inputs have been read by all ranks of the host, and sent.
#include <array>

#include "collectives.h"
#include "slices.h"

namespace pycomm::across {

namespace {

// The stages of one all_reduce of more than a card.
class Pipeline {
 public:
  Pipeline(Operation& operation, Agreement& agreement)
      : o_(operation),
        agreement_(agreement),
        hosts_(operation.placement.hosts()),
        parts_(hosts_ == 2 ? 1 : hosts_),
        segment_(std::min(operation.op.count, operation.segment())),
        slot_bytes_((parts_ + hosts_) * slice_room() * o_.item),
        memory_(operation.group.memory(slots * slot_bytes_)) {
    for (int s = 0; s < slots; ++s)
      flights_.push_back({Flight(o_.group, o_.scope()), Flight(o_.group, o_.scope())});
  }

  void run() {
    const size_t segments = (o_.op.count + segment_ - 1) / segment_;
    reduce_inside(0);
    agreement_.conclude();
    exchange(0);
    for (size_t s = 1; s < segments + 2; ++s) {
      if (s < segments) {
        reduce_inside(s);
        exchange(s);
      }
      if (s - 1 < segments) add(s - 1);
      if (s >= 2) finish(s - 2);
    }
  }

 private:
  static constexpr int slots = 3;

  // Elements of the longest slice of a part.
  size_t slice_room() const {
    const size_t part = chunk_of(segment_, 0, parts_, o_.item).size();
    const size_t longest = std::max(part, chunk_of(segment_, parts_ - 1, parts_, o_.item).size());
    const size_t line = std::max<size_t>(1, 64 / o_.item);
    return (longest / line / o_.locals + 2) * line;
  }
  Range segment(size_t s) const { return {s * segment_, std::min(o_.op.count, (s + 1) * segment_)}; }
  Range part(size_t s, int g) const {
    const Range whole = segment(s), range = chunk_of(whole.size(), g, parts_, o_.item);
    return {whole.begin + range.begin, whole.begin + range.end};
  }
  // This rank's slice of a part, counted from the part's begin.
  Range slice(Range part) const { return chunk_of(part.size(), o_.local, o_.locals, o_.item); }
  // This host's sum of that slice, and what host `h` sends of it.
  const std::byte* sum(size_t s, int g) const {
    return o_.sums_alone() ? o_.at(o_.op.in, part(s, g).begin) : own(s, g);
  }
  std::byte* own(size_t s, int g) const {
    return memory_ + s % slots * slot_bytes_ + g * slice_room() * o_.item;
  }
  std::byte* from(size_t s, int h) const { return own(s, parts_ + h); }
  int rank_at(int host, int local) const { return o_.placement.ranks[host][local]; }

  void reduce_inside(size_t s) {
    if (!agreement_.host_agrees() || o_.sums_alone()) return;
    for (int g = 0; g < parts_; ++g) {
      const Range range = part(s, g);
      reduce_to_slices(o_, o_.at(o_.op.in, range.begin), range.size(), own(s, g));
    }
  }

  template <class Each>
  void for_crossings(Range part, int host, const Each& each) const {
    for (const Crossing& crossing : crossings(slice(part), part.size(), o_.placement.size_of(host), o_.item))
      each(rank_at(host, crossing.peer), crossing.range.begin, crossing.range.size());
  }

  // Slices of sums to the owners of their parts.
  void exchange(size_t s) {
    Flight& flight = flights_[s % slots][0];
    for (int h : o_.others()) {
      const int mine = hosts_ == 2 ? 0 : o_.host, theirs = hosts_ == 2 ? 0 : h;
      const Range received = part(s, mine), sent = part(s, theirs);
      for_crossings(received, h, [&](int rank, size_t begin, size_t count) {
        o_.recv(flight, rank, o_.at(from(s, h), begin - slice(received).begin), count);
      });
      for_crossings(sent, h, [&](int rank, size_t begin, size_t count) {
        o_.send(flight, rank, o_.at(sum(s, theirs), begin - slice(sent).begin), count);
      });
    }
  }

  // The total of this rank's slice, and with more than two hosts its way to the others.
  void add(size_t s) {
    flights_[s % slots][0].land();
    const int mine = hosts_ == 2 ? 0 : o_.host;
    const Range range = part(s, mine), total = slice(range);
    std::vector<const void*> sources;
    for (int h = 0; h < hosts_; ++h) sources.push_back(h == o_.host ? sum(s, mine) : from(s, h));
    o_.sum_hosts(sources, o_.at(o_.op.out, range.begin + total.begin), total.size());
    if (hosts_ == 2) return;
    Flight& flight = flights_[s % slots][1];
    for (int h : o_.others()) {
      const Range theirs = part(s, h);
      for_crossings(theirs, h, [&](int rank, size_t begin, size_t count) {
        o_.recv(flight, rank, o_.at(o_.op.out, theirs.begin + begin), count, 1);
      });
      for_crossings(range, h, [&](int rank, size_t begin, size_t count) {
        o_.send(flight, rank, o_.at(o_.op.out, range.begin + begin), count, 1);
      });
    }
  }

  void finish(size_t s) {
    flights_[s % slots][1].land();
    if (o_.locals == 1) return;
    for (int g = 0; g < parts_; ++g) {
      const Range range = part(s, g);
      gather_slices(o_, o_.at(o_.op.out, range.begin), range.size());
    }
  }

  Operation& o_;
  Agreement& agreement_;
  const int hosts_, parts_;
  const size_t segment_, slot_bytes_;
  std::byte* const memory_;
  std::vector<std::array<Flight, 2>> flights_;
};

}  // namespace

void all_reduce(Operation& operation, Agreement& agreement) {
  agreement.begin();
  if (!agreement.small()) return Pipeline(operation, agreement).run();
  agreement.conclude();
  std::vector<const void*> sources;
  for (int h = 0; h < operation.placement.hosts(); ++h) sources.push_back(agreement.of_host(h));
  operation.sum_hosts(sources, operation.op.out, operation.op.count);
}

}  // namespace pycomm::across
