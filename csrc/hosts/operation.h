// operation.h -- one collective of a group that spans hosts, while it runs: what its steps inside the host
// and over the wire share.
//
// [Note: turns] Host h sends to h+1 first, then to h+2, and so on around; it receives from h-1 first. So
// hosts do not all send to the same one, and each link carries one message each way at a time. A ring moves
// the same bytes over each link, 2 (H-1)/H n for an all_reduce, in 2 (H-1) steps that wait for each other,
// where this has two; and its sums begin at another host for each part. That is why there are no rings,
// whatever the number of hosts.
#pragma once

#include <vector>

#include "across.h"

namespace pycomm {

// Messages under way, in the order in which they are waited for.
class Flight {
 public:
  Flight(Across& group, const WaitScope& scope) : group_(group), scope_(scope) {}
  void add(int peer, TicketPtr ticket) { tickets_.push_back({peer, std::move(ticket)}); }
  void land();  // waits for all of them

 private:
  struct Entry {
    int peer;
    TicketPtr ticket;
  };
  Across& group_;
  const WaitScope& scope_;
  std::vector<Entry> tickets_;
};

class Operation {
 public:
  Operation(Across& group, const Op& op, const WaitScope& scope);
  ~Operation() { group.inside().serve(nullptr); }
  Operation(const Operation&) = delete;

  Across& group;
  const Placement& placement;
  const Op& op;
  const size_t item;
  const int host, local, locals;  // this host, this rank in it, its ranks

  const WaitScope& scope() const { return scope_; }
  // The other hosts, in the order in which this one turns to them: [Note: turns].
  const std::vector<int>& others() const { return others_; }
  // Calls differ. All ranks come to the same verdict, so the group goes on.
  [[noreturn]] void raise_mismatch(int rank, const std::string& text) const;
  // A step inside the host.
  void inside(Op step);
  // From now on steps inside may have to wait for the wire: [Note: limits inside], across.h.
  void patient_inside() {
    inside_scope_.deadline = scope_.deadline + patience;
    inside_scope_.patient = true;
  }

  // Messages of `count` elements to or from a rank; none if count is 0. Two phases of an operation do not
  // mix up their messages.
  void send(Flight& flight, int rank, const std::byte* data, size_t count, int phase = 0);
  void recv(Flight& flight, int rank, std::byte* data, size_t count, int phase = 0);
  // What the inner steps and the sum over hosts do of op's reduction.
  Op reduction_inside(OpKind kind) const;
  bool sums_alone() const;  // one rank per host: its input is the host's sum, as it is
  void sum_hosts(const std::vector<const void*>& of_hosts, std::byte* out, size_t count) const;

  std::byte* at(std::byte* data, size_t element) const { return data + element * item; }
  const std::byte* at(const std::byte* data, size_t element) const { return data + element * item; }
  // Where the segments of `count` elements begin and end: long enough to hide the latency, short enough that
  // memory and wire work at once.
  size_t segment() const;

 private:
  static constexpr auto patience = std::chrono::milliseconds(1500);
  bool divides_inside() const;

  const WaitScope scope_;
  WaitScope inside_scope_;
  const uint32_t tag_;
  std::vector<int> others_;
};

}  // namespace pycomm
