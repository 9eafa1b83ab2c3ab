// gather.cc -- gather and scatter over hosts: blocks of the root's host through shared memory, the others
// between the root and their ranks.
#include "collectives.h"

namespace pycomm::across {

namespace {

// The root's list for the ranks of its host.
std::vector<Part> of_host(const Operation& o, const std::vector<Part>& parts) {
  std::vector<Part> here;
  for (int rank : o.placement.ranks[o.host])
    if (!parts.empty()) here.push_back(parts[rank]);
  return here;
}

template <class Move>
void with_others(Operation& o, const Move& move) {
  Flight flight(o.group, o.scope());
  const int root = o.op.root, rank = o.group.rank();
  if (rank == root) {
    for (int p = 0; p < o.placement.world_size(); ++p)
      if (o.placement.host_of[p] != o.host) move(flight, p);
  } else if (o.placement.host_of[root] != o.host) {
    move(flight, root);
  }
  if (o.placement.host_of[root] == o.host) {
    Op step;
    step.kind = o.op.kind;
    step.dtype = o.op.dtype;
    step.count = o.op.count;
    step.root = o.placement.local_of[root];
    step.in = o.op.in;
    step.out = o.op.out;
    step.in_parts = of_host(o, o.op.in_parts);
    step.out_parts = of_host(o, o.op.out_parts);
    o.inside(std::move(step));
  }
  flight.land();
}

}  // namespace

void gather(Operation& o, Agreement& agreement) {
  agreement.begin();
  agreement.conclude();
  with_others(o, [&](Flight& flight, int peer) {
    if (o.group.rank() == o.op.root) o.recv(flight, peer, o.op.out_parts[peer].data, o.op.count);
    else o.send(flight, peer, o.op.in, o.op.count);
  });
}

void scatter(Operation& o, Agreement& agreement) {
  agreement.begin();
  agreement.conclude();
  with_others(o, [&](Flight& flight, int peer) {
    if (o.group.rank() == o.op.root) o.send(flight, peer, o.op.in_parts[peer].data, o.op.count);
    else o.recv(flight, peer, o.op.out, o.op.count);
  });
}

}  // namespace pycomm::across
