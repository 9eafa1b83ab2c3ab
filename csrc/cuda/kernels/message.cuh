// message.cuh -- send and recv: two kernels on two ranks, which may run beside any collective and any other
// message.
//
// Each ordered pair of ranks has a channel, one end in the Control of either, with an epoch of its own.
// Messages of a channel go in order of issue.
//
//   sender    header ->                 fill half s & 1, filled(s) ->        <- drained(s)
//   receiver            <- header                                copy to out
//
// Both ends wait for the other's header and compare before anything moves: so a send ends only when the recv
// has come, and a difference in count, dtype or tag is an error on both. The receiver's header also says that
// its earlier recv is over, so both halves are free. Buffers that the receiver can address (direct_in) are
// read in place; the sender then waits until they have been. Cost: nbytes read by the receiver, one exchange,
// plus one copy on the sender where it is staged.
#pragma once

#include "movement.cuh"
#include "session.cuh"

namespace pycomm::cuda {

template <class Ctx>
class Link {
 public:
  PC_FN Link(Ctx& c, const Args& a, bool sends)
      : c_(c),
        a_(a),
        sends_(sends),
        mine_(end_of(a.group.rank, a.peer, sends)),
        theirs_(end_of(a.peer, a.group.rank, !sends)) {
    uint64_t last = 0;
    if (c.thread() % 32 == 0) last = c.load_relaxed(&mine_.epoch, Scope::gpu);
    epoch_ = c.shuffle(last, 0) + 1;
  }

  PC_FN bool begin() {
    if ((a_.stages & stage_announce) && c_.block() == 0 && c_.thread() == 0) {
      Announcement call = a_.call;
      call.in = a_.in_handle[0];
      write_header(c_, theirs_.headers[epoch_ & 1], call, epoch_, Ordering::acquire_release);
    }
    const bool reads_peer = a_.resident || (a_.stages & (stage_gather | stage_end));
    return !reads_peer || compare();
  }

  PC_FN uint32_t segments() const {
    return num_segments(a_.in_bytes[0], c_.block(), c_.blocks(), a_.segment_bytes);
  }

  PC_FN bool send() {
    const uint32_t count = segments(), end = count < a_.end_segment ? count : a_.end_segment;
    if ((a_.stages & stage_fill) && !a_.direct_in)
      for (uint32_t s = a_.first_segment; s < end; ++s) {
        if (s >= 2 && !wait(s - 2)) return false;
        const Span at = span(s);
        copy(c_, slot(a_.group.rank, a_.peer, s), a_.in_part[0] + at.begin, at.size);
        post(s);
      }
    return !(a_.stages & stage_end) || count == 0 || wait(count - 1);
  }

  PC_FN bool receive() {
    const uint32_t count = segments(), end = count < a_.end_segment ? count : a_.end_segment;
    const std::byte* direct = c_.template shared<Shared>().in[0];
    for (uint32_t s = a_.first_segment; s < end && (a_.stages & stage_gather); ++s) {
      if (!a_.direct_in && !wait(s)) return false;
      const Span at = span(s);
      copy(c_, a_.out_part[0] + at.begin, a_.direct_in ? direct + at.begin : slot(a_.peer, a_.group.rank, s),
           at.size);
      post(s);
    }
    return true;
  }

  PC_FN void end() {
    if (!(a_.stages & stage_end) || c_.thread() != 0) return;
    if (c_.add(&mine_.ticket, 1, Scope::gpu) + 1 != static_cast<uint64_t>(c_.blocks())) return;
    c_.store_relaxed(&mine_.ticket, 0, Scope::gpu);
    c_.store_relaxed(&mine_.epoch, epoch_, Scope::gpu);
  }

 private:
  // The end on `rank` of its channel with `peer`.
  PC_FN Channel& end_of(int rank, int peer, bool sends) const {
    Control& control = control_of(a_.group, rank);
    return sends ? control.sending[peer] : control.receiving[peer];
  }
  PC_FN uint64_t value_of(uint32_t step) const { return epoch_ << step_bits | (step + 1); }
  PC_FN Span span(uint32_t s) const {
    return segment_of(a_.in_bytes[0], c_.block(), c_.blocks(), a_.segment_bytes, s);
  }
  PC_FN std::byte* slot(int src, int dst, uint32_t s) const {
    const Group& g = a_.group;
    return g.arena[src] + g.message_offset + dst * g.message_bytes + (s & 1) * (g.message_bytes / 2) +
           c_.block() * a_.segment_bytes;
  }

  PC_FN bool compare() {
    bool late = false, came = true, same = true, stopped = false;
    // See [Note: late starts]: the receiver reads the sender's buffer.
    if (c_.thread() == 1 % c_.threads() && a_.direct_in && !sends_) stopped = is_stopped(c_, a_);
    if (c_.thread() == 0) {
      const bool left = a_.direct_in && !sends_ && c_.load_relaxed(&mine_.gave_up, Scope::system);
      Announcement there;
      came = read_header(c_, a_, mine_.headers[epoch_ & 1], epoch_, Ordering::acquire_release, there, late);
      if (came) {
        same = there.meta == a_.call.meta && there.count == a_.call.count && there.extra == a_.call.extra;
        c_.template shared<Shared>().in[0] = resolve(a_.group, there.in, a_.peer);
        if (!same && c_.block() == 0)
          report(c_, record(), Fault::mismatch, epoch_, a_.peer, 0, a_.call, there);
        if (left) blame(Fault::gave_up);
        came = !left;
      } else {
        give_up(late);
      }
    }
    return !c_.sync_or(!came || !same || stopped);
  }

  // What the block did before is ordered before it.
  PC_FN void post(uint32_t step) {
    c_.sync();
    if (c_.thread() == 0) c_.store_release(&theirs_.flags[c_.block()], value_of(step), Scope::system);
  }

  PC_FN bool wait(uint32_t step) {
    bool late = false, came = true;
    if (c_.thread() == 0) {
      const uint64_t* word = &mine_.flags[c_.block()];
      came = spin(c_, a_, word, late, [&] { return c_.load_acquire(word, Scope::system) >= value_of(step); });
      if (!came) give_up(late);
    }
    return !c_.sync_or(!came);
  }

  PC_FN ErrorRecord& record() const {
    return a_.group.error->records[sends_ ? record_of_sending(a_.peer) : record_of_receiving(a_.peer)];
  }
  // Tells the other end first: [Note: late starts] in session.cuh.
  PC_FN void give_up(bool late) {
    c_.store_relaxed(&theirs_.gave_up, uint64_t{1}, Scope::system);
    if (late || !a_.resident) blame(a_.resident ? Fault::timeout : Fault::protocol);  // else the host knows
  }
  PC_FN void blame(Fault fault) {
    report(c_, record(), fault, epoch_, a_.peer, 1ull << a_.peer, a_.call, a_.call);
  }

  Ctx& c_;
  const Args& a_;
  const bool sends_;
  Channel &mine_, &theirs_;
  uint64_t epoch_;
};

template <class Ctx>
PC_FN void send(Ctx& c, const Args& a) {
  Link<Ctx> link(c, a, true);
  if (link.begin()) link.send();
  link.end();
}

template <class Ctx>
PC_FN void recv(Ctx& c, const Args& a) {
  Link<Ctx> link(c, a, false);
  if (link.begin()) link.receive();
  link.end();
}

}  // namespace pycomm::cuda
