// all_to_all.cc -- all_to_all over hosts: what stays in the host goes through shared memory, every other
// block straight to its rank. k (N - k) b bytes on each link, which no two levels could lower.
//
// Where sizes differ from pair to pair they are not in the headers, so every rank gets all n*n of them first,
// by the same three steps (agree.h), and all come to the same verdict. The headers say whether any rank has
// passed sizes; then all do so, those with equal sizes too.
#include <algorithm>

#include "collectives.h"

namespace pycomm::across {

namespace {

constexpr uint64_t unknown = ~uint64_t{0};  // a receiver that takes what comes
constexpr int tables_phase = 2;

class Tables {
 public:
  explicit Tables(Operation& o) : o_(o), n_(o.placement.world_size()), rows_(2 * n_ * n_) {
    uint64_t* mine = row(o.group.rank());
    for (size_t p = 0; p < n_; ++p) {
      mine[p] = o.op.in_parts[p].count;
      mine[n_ + p] = o.op.receiver ? unknown : o.op.out_parts[p].count;
    }
    share(o.host);
    exchange();
    for (int h = 0; h < o.placement.hosts(); ++h)
      if (h != o.host) share_from_leader(h);
  }

  uint64_t sent(int src, int dst) { return row(src)[dst]; }
  uint64_t expected(int dst, int src) { return row(dst)[n_ + src]; }

 private:
  // Rows lie in the order of hosts, so that those of one host are one message.
  uint64_t* row(int rank) {
    size_t before = o_.placement.local_of[rank];
    for (int h = 0; h < o_.placement.host_of[rank]; ++h) before += o_.placement.size_of(h);
    return rows_.data() + before * 2 * n_;
  }
  std::byte* bytes(int rank) { return reinterpret_cast<std::byte*>(row(rank)); }
  size_t row_bytes() const { return 2 * n_ * sizeof(uint64_t); }

  void share(int h) {
    Op step;
    step.kind = OpKind::all_gather;
    step.count = row_bytes();
    for (int rank : o_.placement.ranks[h]) step.out_parts.push_back({bytes(rank), row_bytes()});
    step.in = bytes(o_.group.rank());
    o_.inside(std::move(step));
  }

  void exchange() {
    if (o_.local != 0) return;
    Flight flight(o_.group, o_.scope());
    const size_t items = row_bytes() / o_.item;  // o_.item divides 16
    for (bool sends : {false, true})
      for (int h = 0; h < o_.placement.hosts(); ++h) {
        if (h == o_.host) continue;
        const int leader = o_.placement.ranks[h][0];
        if (sends)
          o_.send(flight, leader, bytes(o_.placement.ranks[o_.host][0]), items * o_.locals, tables_phase);
        else o_.recv(flight, leader, bytes(leader), items * o_.placement.size_of(h), tables_phase);
      }
    flight.land();
  }

  void share_from_leader(int h) {
    Op step;
    step.kind = OpKind::broadcast;
    step.count = row_bytes() * o_.placement.size_of(h);
    std::byte* data = bytes(o_.placement.ranks[h][0]);
    if (o_.local == 0) step.in = data;
    else step.out = data;
    o_.inside(std::move(step));
  }

  Operation& o_;
  const size_t n_;
  std::vector<uint64_t> rows_;
};

void compare(Operation& o, Tables& tables) {
  const int n = o.placement.world_size(), rank = o.group.rank();
  for (int src = 0; src < n; ++src)
    for (int dst = 0; dst < n; ++dst) {
      const uint64_t sent = tables.sent(src, dst), expected = tables.expected(dst, src);
      if (sent == expected || expected == unknown) continue;
      const int other = src == rank ? dst : src;
      o.raise_mismatch(other, describe_splits(o.placement.name(src), sent, o.placement.name(dst), expected));
    }
}

void move(Operation& o, const std::vector<Part>& from, const std::vector<Part>& to) {
  Flight flight(o.group, o.scope());
  const int n = o.placement.world_size(), rank = o.group.rank();
  for (int p = 0; p < n; ++p)
    if (o.placement.host_of[p] != o.host) o.recv(flight, p, to[p].data, to[p].count);
  for (int i = 1; i < n; ++i) {  // each begins with another peer
    const int p = (rank + i) % n;
    if (o.placement.host_of[p] != o.host) o.send(flight, p, from[p].data, from[p].count);
  }
  Op step;
  step.kind = OpKind::all_to_all;
  step.dtype = o.op.dtype;
  step.uneven = true;
  for (int p : o.placement.ranks[o.host]) {
    step.in_parts.push_back(from[p]);
    step.out_parts.push_back(to[p]);
  }
  o.inside(std::move(step));
  flight.land();
}

}  // namespace

void all_to_all(Operation& o, Agreement& agreement) {
  agreement.begin();
  agreement.conclude();
  std::vector<Part> out = o.op.out_parts;
  if (agreement.sizes_by_pairs()) {
    Tables tables(o);
    compare(o, tables);
    for (int p = 0; o.op.receiver && p < o.placement.world_size(); ++p) {
      const size_t count = tables.sent(p, o.group.rank());
      out.push_back({o.op.receiver->room(p, count), count});
    }
  }
  if (!o.op.on_device) move(o, o.op.in_parts, out);
}

}  // namespace pycomm::across
