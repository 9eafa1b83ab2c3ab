// all_gather.cc -- all_gather over hosts: every rank sends its block to one rank of each other host, which
// shares it there. The blocks of a host of k ranks go to the ranks of another in turn (rank i to rank i mod
// k'), so all of them receive. (N - k) b bytes into each host's link. Long blocks go in pieces, so that one
// is on the wire while the one before is shared.
#include <deque>

#include "collectives.h"

namespace pycomm::across {

namespace {

class Blocks {
 public:
  explicit Blocks(Operation& operation) : o_(operation), piece_(operation.segment()) {
    for (const Part& part : o_.op.out_parts) longest_ = std::max(longest_, part.count);
  }

  void run() {
    share(o_.host, 0, SIZE_MAX, 0);
    std::deque<Flight> flights;
    size_t landed = 0;
    auto land = [&] {
      flights.front().land();
      flights.pop_front();
      for (int h = 0; h < o_.placement.hosts(); ++h)
        for (int first = 0; h != o_.host && first < o_.placement.size_of(h); first += o_.locals)
          share(h, landed, piece_, first);
      landed += piece_;
    };
    for (size_t begin = 0; begin < longest_; begin += piece_) {
      post(flights.emplace_back(o_.group, o_.scope()), begin);
      if (flights.size() > 1) land();
    }
    while (!flights.empty()) land();
  }

 private:
  // What of a block lies in the piece that starts at `begin`.
  Part piece(int rank, size_t begin, size_t length) const {
    const Part& block = o_.op.out_parts[rank];
    if (begin >= block.count) return {block.data, 0};
    return {o_.at(block.data, begin), std::min(length, block.count - begin)};
  }

  void post(Flight& flight, size_t begin) {
    const Part own = piece(o_.group.rank(), begin, piece_);
    for (int h = 0; h < o_.placement.hosts(); ++h) {
      if (h == o_.host) continue;
      for (int l = o_.local; l < o_.placement.size_of(h); l += o_.locals) {
        const int src = o_.placement.ranks[h][l];
        const Part part = piece(src, begin, piece_);
        o_.recv(flight, src, part.data, part.count);
      }
    }
    for (int h : o_.others())
      o_.send(flight, o_.placement.ranks[h][o_.local % o_.placement.size_of(h)], own.data, own.count);
  }

  // Local rank l gives a piece of the block of rank first + l of host h to the ranks of this host.
  void share(int h, size_t begin, size_t length, int first) {
    Op step;
    step.kind = OpKind::all_gather;
    step.dtype = o_.op.dtype;
    step.uneven = true;
    for (int l = 0; l < o_.locals; ++l) {
      const bool there = first + l < o_.placement.size_of(h);
      step.out_parts.push_back(there ? piece(o_.placement.ranks[h][first + l], begin, length)
                                     : Part{nullptr, 0});
      step.count += step.out_parts.back().count;
    }
    step.in = step.out_parts[o_.local].data;
    if (h == o_.host) step.in = o_.op.in;
    o_.inside(std::move(step));
  }

  Operation& o_;
  const size_t piece_;
  size_t longest_ = 0;
};

}  // namespace

void all_gather(Operation& o, Agreement& agreement) {
  agreement.begin();
  agreement.conclude();
  if (!agreement.small()) return Blocks(o).run();
  for (int rank = 0; rank < o.placement.world_size() && o.op.count; ++rank)
    std::copy_n(agreement.of_host(o.placement.host_of[rank]) + o.placement.local_of[rank] * o.op.nbytes(),
                o.op.nbytes(), o.op.out_parts[rank].data);
}

}  // namespace pycomm::across
