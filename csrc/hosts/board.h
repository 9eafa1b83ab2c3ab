// board.h -- what the ranks of a host tell each other about a group that spans hosts, in shared memory: which
// ranks of other hosts have closed the group (the leader writes what the other leaders tell it, speaker.h),
// which operation each rank of this host has come to and has finished, which one is overdue, when the leader
// was last seen to run, and the words of monitored barriers (communicator/monitored_barrier.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

#include "../collectives/collectives.h"
#include "../communicator/registered.h"

namespace pycomm {

class Board {
 public:
  // Collective among the ranks of the host.
  Board(Communicator& inside, int world_size)
      : buffer_(allocate_registered(inside, sizeof(Overdue) + sizeof(Missing) +
                                                world_size * (sizeof(Line) + sizeof(BarrierLine)) +
                                                sizeof(Pulse))),
        overdue_(reinterpret_cast<Overdue*>(inside.transport().at_peer(buffer_.region, 0, buffer_.data))),
        missing_(reinterpret_cast<Missing*>(overdue_ + 1)),
        lines_(reinterpret_cast<Line*>(missing_ + 1)),
        barrier_(reinterpret_cast<BarrierLine*>(lines_ + world_size)),
        pulse_(reinterpret_cast<Pulse*>(barrier_ + world_size)) {}

  // What it had sent until its last operation may still be on its way.
  void note_closed(int rank, uint64_t finished) {
    note_finished(rank, finished);
    lines_[rank].closed.store(1, std::memory_order_release);
  }
  bool closed(int rank) const { return lines_[rank].closed.load(std::memory_order_acquire) != 0; }

  void note_arrival(int rank, uint64_t sequence) {
    lines_[rank].arrived.store(sequence, std::memory_order_release);
  }
  void note_finished(int rank, uint64_t sequence) {
    lines_[rank].finished.store(sequence, std::memory_order_release);
  }
  uint64_t finished(int rank) const { return lines_[rank].finished.load(std::memory_order_acquire); }
  uint64_t arrived(int rank) const { return lines_[rank].arrived.load(std::memory_order_acquire); }

  // The deadline of a rank of this host has passed in this operation.
  void note_overdue(const OpInfo& op, double timeout) {
    if (overdue_->sequence.load(std::memory_order_relaxed) >= op.sequence) return;
    overdue_->kind.store(static_cast<uint32_t>(op.kind), std::memory_order_relaxed);
    overdue_->timeout.store(timeout, std::memory_order_relaxed);
    overdue_->sequence.store(op.sequence, std::memory_order_release);
  }
  OpInfo overdue(double& timeout) const {
    const uint64_t sequence = overdue_->sequence.load(std::memory_order_acquire);
    timeout = overdue_->timeout.load(std::memory_order_relaxed);
    return {static_cast<OpKind>(overdue_->kind.load(std::memory_order_relaxed)), sequence};
  }

  // The leader runs. Its clock is that of all processes of the host.
  void note_pulse() { pulse_->store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed); }
  std::chrono::steady_clock::time_point pulse() const {
    return Clock::time_point(Clock::duration(pulse_->load(std::memory_order_relaxed)));
  }

  BarrierBoard barrier() const { return {barrier_, *missing_}; }

 private:
  using Clock = std::chrono::steady_clock;
  using Pulse = std::atomic<Clock::rep>;
  struct Overdue {
    std::atomic<uint64_t> sequence;
    std::atomic<double> timeout;
    std::atomic<uint32_t> kind;
  };
  using Missing = std::atomic<uint64_t>[max_world_size / 64];
  struct Line {
    std::atomic<uint64_t> arrived, finished;
    std::atomic<uint32_t> closed;
  };
  const RegisteredBuffer buffer_;
  Overdue* const overdue_;
  Missing* const missing_;
  Line* const lines_;
  BarrierLine* const barrier_;
  Pulse* const pulse_;
};

}  // namespace pycomm
