// across.h -- the collectives of a group that spans hosts: two levels, shared memory inside a host, messages
// between hosts.
//
//   host 0   rank 0  rank 1           1  inside   each host reduces in shared memory; rank l of the host
//              |       |                          gets slice l of its sum
//   wire       |       |              2  across   ranks with the same slice send it to each other
//              |       |              3  inside   the slices are gathered in shared memory
//   host 1   rank 2  rank 3
//
// so every byte crosses a host's link once for each other host, by as many connections as a host has ranks.
// Every collective has its own file; what they share is here: the inner group, the wire, waiting and memory.
//
// [Note: sums over hosts] Inside a host ranks are added in their order, the hosts' sums in the order of
// hosts, by one owner (two hosts: by both). So all ranks get equal bits, and every run with the same
// placement gets them; another placement adds in another order. 16-bit floats are rounded once per host and
// once more.
//
// [Note: limits inside] In the inner steps that follow a wait for another host, ranks of this host may wait
// for one that waits for the wire. So such a step gives up later than the wire, which gives up later than a
// host in which a rank is missing: whoever knows best speaks first.
#pragma once

#include <memory>
#include <vector>

#include "../communicator/communicator.h"
#include "board.h"
#include "placement.h"
#include "speaker.h"
#include "ticker.h"
#include "wire.h"

namespace pycomm {

// What the hosts' leaders tell each other of one operation (agree.h), one host behind the other, and the
// messages that bring it.
struct Pages {
  std::vector<std::byte> bytes;
  std::vector<std::pair<int, TicketPtr>> coming;  // with the ranks that send them
};

class Across final : public HostsSide {
 public:
  Across(Placement placement, int rank, std::shared_ptr<Communicator> inside, Wires wires);
  ~Across() override;

  void run(const Op& op, const WaitScope& scope) override;
  void leave() override;
  bool on_own_thread() const override;
  std::string describe() const override { return placement_.describe(); }
  Communicator& inside() override { return *inside_; }
  int local(int rank) const override {
    return placement_.host_of[rank] == host_ ? placement_.local_of[rank] : -1;
  }
  void blame(const OpInfo& op, double late) override;
  std::string name(int rank) const override { return placement_.name(rank); }
  bool closed(int rank) const override;
  void look_at_lives(const OpInfo& op) override;
  BarrierBoard barrier_board() override { return board_.barrier(); }
  std::shared_ptr<Continuation> after() override { return wires_.after; }

  const Placement& placement() const { return placement_; }
  int rank() const { return rank_; }
  int host() const { return host_; }
  int local_rank() const { return placement_.local_of[rank_]; }
  int local_size() const { return placement_.size_of(host_); }
  bool leads() const { return local_rank() == 0; }
  bool leader_died() const;  // that of this host, if it is another rank
  Wire& wire() { return *wires_.data; }
  Transport& transport() { return inside_->transport(); }
  const Transport& transport() const { return inside_->transport(); }

  // Until the message is there, or the group is not fit for it any more. `peer` is a rank.
  void await(Ticket& ticket, int peer, const WaitScope& scope);
  // Breaks the group, and throws.
  [[noreturn]] void fail(ErrorKind kind, int peer, const std::string& text, const WaitScope& scope);
  const Board& board() const { return board_; }
  Ticker& ticker() { return *ticker_; }
  const std::shared_ptr<Communicator>& shared_inside() const { return inside_; }
  // The ticket that post() returns, of a message to or from `peer`.
  template <class Post>
  TicketPtr posted(int peer, const WaitScope& scope, const Post& post) {
    try {
      return post();
    } catch (const WireError& error) {
      lost(peer, error, scope);
    }
  }
  std::byte* memory(size_t nbytes);  // until the next call; not cleared
  Pages& pages(uint64_t sequence) { return pages_[sequence & 1]; }

 private:
  void look(int peer, std::chrono::steady_clock::time_point& closed, const WaitScope& scope);
  void look_at_leader(const WaitScope& scope);
  void look_at_pulse();  // of the leader, by the ticker's thread
  [[noreturn]] void lost(int peer, const WireError& error, const WaitScope& scope);
  [[noreturn]] void fail_closed(int peer, const WaitScope& scope);

  const Placement placement_;
  const int rank_, host_;
  const std::shared_ptr<Communicator> inside_;
  Board board_;
  Wires wires_;
  std::chrono::steady_clock::time_point pulse_seen_, pulse_looked_at_;  // of the ticker's thread
  std::unique_ptr<Ticker> ticker_;
  std::unique_ptr<Speaker> speaker_;  // of a leader
  Pages pages_[2];  // of this operation and of the next
  std::unique_ptr<std::byte[]> memory_;
  size_t memory_bytes_ = 0;
};

}  // namespace pycomm
