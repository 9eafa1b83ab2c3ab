// reduce.cc -- reduce over hosts: as all_reduce, but the sums of all hosts go to the root's host alone, whose
// ranks add one slice each and give it to the root. n bytes on the link of each other host.
#include "collectives.h"
#include "slices.h"

namespace pycomm::across {

namespace {

// Every rank's slice of `count` elements to the root, who has them in order at `out`.
void slices_to_root(Operation& o, const std::byte* slice, std::byte* out, size_t count) {
  const int root = o.placement.local_of[o.op.root];
  Op step;
  step.kind = OpKind::all_to_all;
  step.dtype = o.op.dtype;
  step.uneven = true;
  for (int l = 0; l < o.locals; ++l) {
    const Range range = chunk_of(count, l, o.locals, o.item);
    const size_t mine = chunk_of(count, o.local, o.locals, o.item).size();
    step.in_parts.push_back({const_cast<std::byte*>(slice), l == root ? mine : 0});
    step.out_parts.push_back(
        {o.local == root ? o.at(out, range.begin) : nullptr, o.local == root ? range.size() : 0});
  }
  o.inside(std::move(step));
}

void reduce_segment(Operation& o, size_t begin, size_t count, std::byte* memory) {
  const int home = o.placement.host_of[o.op.root];
  const Range slice = chunk_of(count, o.local, o.locals, o.item);
  const size_t room = slice.size() * o.item;
  Flight flight(o.group, o.scope());
  std::vector<const void*> sources(o.placement.hosts(), memory);
  if (o.host != home) {
    for (const Crossing& each : crossings(slice, count, o.placement.size_of(home), o.item))
      o.send(flight, o.placement.ranks[home][each.peer], o.at(memory, each.range.begin - slice.begin),
             each.range.size());
    return flight.land();
  }
  std::byte* to = memory;
  for (int h = 0; h < o.placement.hosts(); ++h) {
    if (h == home) continue;
    sources[h] = to += room;
    for (const Crossing& each : crossings(slice, count, o.placement.size_of(h), o.item))
      o.recv(flight, o.placement.ranks[h][each.peer], o.at(to, each.range.begin - slice.begin),
             each.range.size());
  }
  flight.land();
  o.sum_hosts(sources, memory, slice.size());
  slices_to_root(o, memory, o.op.out ? o.at(o.op.out, begin) : nullptr, count);
}

}  // namespace

void reduce(Operation& o, Agreement& agreement) {
  agreement.begin();
  if (agreement.small()) {
    agreement.conclude();
    std::vector<const void*> sources;
    for (int h = 0; h < o.placement.hosts(); ++h) sources.push_back(agreement.of_host(h));
    if (o.group.rank() == o.op.root) o.sum_hosts(sources, o.op.out, o.op.count);
    return;
  }
  agreement.conclude();
  const size_t segment = std::min(o.op.count, o.segment());
  const size_t longest = (segment / o.locals + 128) * o.item;
  std::byte* memory = o.group.memory(longest * o.placement.hosts());
  for (size_t begin = 0; begin < o.op.count; begin += segment) {
    const size_t count = std::min(segment, o.op.count - begin);
    reduce_to_slices(o, o.at(o.op.in, begin), count, memory);
    reduce_segment(o, begin, count, memory);
  }
}

}  // namespace pycomm::across
