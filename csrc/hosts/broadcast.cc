// broadcast.cc -- broadcast over hosts: segment by segment, the root's host shares it in shared memory, its
// ranks send a slice each to every other host, and there the slices are gathered. n (H-1) bytes on the link
// of the root's host, n on the others'.
#include <deque>

#include "collectives.h"
#include "slices.h"

namespace pycomm::across {

namespace {

void share_inside(Operation& o, std::byte* data, size_t count) {
  Op step;
  step.kind = OpKind::broadcast;
  step.dtype = o.op.dtype;
  step.count = count;
  step.root = o.placement.local_of[o.op.root];
  if (o.group.rank() == o.op.root) step.in = data;
  else step.out = data;
  o.inside(std::move(step));
}

// What this rank's slice of a segment exchanges with host `h`.
template <class Each>
void for_pieces(Operation& o, int h, size_t count, const Each& each) {
  const Range slice = chunk_of(count, o.local, o.locals, o.item);
  for (const Crossing& piece : crossings(slice, count, o.placement.size_of(h), o.item))
    each(o.placement.ranks[h][piece.peer], piece.range);
}

}  // namespace

void broadcast(Operation& o, Agreement& agreement) {
  const Op& op = o.op;
  const int home = o.placement.host_of[op.root];
  std::byte* data = op.out ? op.out : const_cast<std::byte*>(op.in);
  agreement.begin();
  agreement.conclude();
  if (agreement.small()) {
    if (o.group.rank() != op.root && op.count) std::copy_n(agreement.of_host(home), op.nbytes(), op.out);
    return;
  }
  const size_t segment = std::min(op.count, o.segment());
  std::deque<Flight> flights;
  auto land = [&](size_t begin) {
    flights.front().land();
    flights.pop_front();
    if (o.host != home) gather_slices(o, o.at(data, begin), std::min(segment, op.count - begin));
  };
  for (size_t begin = 0; begin < op.count; begin += segment) {
    const size_t count = std::min(segment, op.count - begin);
    std::byte* piece = o.at(data, begin);
    Flight& flight = flights.emplace_back(o.group, o.scope());
    if (o.host == home) {
      share_inside(o, piece, count);
      for (int h = 0; h < o.placement.hosts(); ++h)
        if (h != home)
          for_pieces(o, h, count, [&](int rank, Range range) {
            o.send(flight, rank, o.at(piece, range.begin), range.size());
          });
    } else {
      for_pieces(o, home, count, [&](int rank, Range range) {
        o.recv(flight, rank, o.at(piece, range.begin), range.size());
      });
    }
    if (flights.size() > 1) land(begin - segment);
  }
  if (!flights.empty()) land((op.count - 1) / segment * segment);
}

}  // namespace pycomm::across
