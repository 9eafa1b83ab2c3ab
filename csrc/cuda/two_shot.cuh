// two_shot.cuh -- reduce-scatter, then (for all_reduce and reduce) fetch the results; broadcast as scatter and all-gather.
//
// part[q] of every buffer belongs to rank q. First shot: each rank reduces its own part out of all inputs. Second: everybody (all_reduce),
// or the root (reduce), fetches the results; reduce_scatter leaves it out.
//
//             rank 0            rank 1            rank 2
//   start     a0   b0   c0      a1   b1   c1      a2   b2   c2
//   reduce    A = a0+a1+a2      B = b0+b1+b2      C = c0+c1+c2        read 2 parts of peers each, in rank order
//   gather    A    B    C       A    B    C       A    B    C         read 2 results of peers
//
// Cost per rank: 2(n-1)/n * nbytes read from peers, 2 exchanges. Every link carries the same; a root that reduced or sent all alone
// would be n-1 times slower. copy_two_shot is the same with "copy from the root" as the first shot. Source: Rabenseifner 2004.
//
// A slice goes through the staging in segments (layout.h). What orders them, for each block by itself; step s uses half s & 1:
//
//   acquire(s)  wait drained(s-2) of all: nobody reads this half any more
//   fill(s)     copy own inputs of the other parts into the half                          post filled(s)
//   reduce(s)   wait filled(s) of all; reduce own part; into the result slot, or out      post reduced(s)
//   gather(s)   wait reduced(s) of all; copy their results to out                         post drained(s)
//
// fill(s+1) runs before reduce(s), so that the peers' inputs of the next segment are there when this one is done. Inputs that peers address
// (direct_in) are not filled, results that they address (direct_out) lie in out at once; then a slice is one segment, and since peers read
// the caller's own buffers the operation ends with wait drained of all. In place, direct: part q of my buffer is overwritten in
// gather, after rank q's `reduced`, which it posts when it has read that part.
#pragma once

#include "movement.cuh"
#include "session.cuh"

namespace pycomm::cuda {

// The first shot of a reduction, and of a broadcast.
template <class T, ReduceOp op>
struct Reduce {
  template <class Ctx>
  PC_FN static void run(Ctx& c, const Args& a, std::byte* to, Sources sources, uint64_t nbytes) {
    reduce<T, op>(c, a, to, sources, a.group.world_size, 0, nbytes);
  }
};
struct CopyFromRoot {
  template <class Ctx>
  PC_FN static void run(Ctx& c, const Args& a, std::byte* to, Sources sources, uint64_t nbytes) {
    copy(c, to, sources[a.root], nbytes);
  }
};

template <class Shot, class Ctx>
class TwoShot {
 public:
  PC_FN TwoShot(Ctx& c, const Args& a, Session<Ctx>& session)
      : c_(c),
        a_(a),
        session_(session),
        shared_(c.template shared<Shared>()),
        n_(a.group.world_size),
        me_(a.group.rank),
        all_((1u << n_) - 1) {}

  // False: given up.
  PC_FN bool run() {
    uint32_t last = 0;
    for (int q = 0; q < n_; ++q) {
      const uint32_t count = num_segments(a_.in_bytes[q], c_.block(), c_.blocks(), a_.segment_bytes);
      last = count > last ? count : last;
    }
    const uint32_t end = last < a_.end_segment ? last : a_.end_segment;
    for (uint32_t s = a_.first_segment; s <= end; ++s) {  // fills s, finishes s - 1
      if (s < end && !fill(s)) return false;
      if (s == a_.first_segment) continue;
      if ((a_.stages & stage_reduce) && !reduce_own(s - 1)) return false;
      if ((a_.stages & stage_gather) && !gather(s - 1)) return false;
    }
    if (last == 0 || !(a_.stages & stage_end) || !(a_.direct_in || a_.direct_out)) return true;
    return session_.wait(Flag::drained, all_, last - 1);
  }

 private:
  PC_FN Span segment(int q, uint32_t s) const { return segment_of(a_.in_bytes[q], c_.block(), c_.blocks(), a_.segment_bytes, s); }
  PC_FN std::byte* slot(int owner, int index, uint32_t s) const { return slot_of(a_, owner, c_.block(), index, s); }
  PC_FN int result_slot() const { return a_.slots - 1; }

  PC_FN bool fill(uint32_t s) {
    if (!(a_.stages & stage_fill)) return true;
    if (s >= 2 && !session_.wait(Flag::drained, all_, s - 2)) return false;
    if (a_.direct_in || !a_.exposes) return true;
    for (int k = 1; k < n_; ++k) {
      const int q = (me_ + k) % n_;
      const Span span = segment(q, s);
      copy(c_, slot(me_, q, s), a_.in_part[q] + span.begin, span.size);
    }
    session_.post(Flag::filled, all_, s);
    return true;
  }

  PC_FN bool reduce_own(uint32_t s) {
    if (!a_.direct_in && !session_.wait(Flag::filled, a_.reads, s)) return false;
    const Span span = segment(me_, s);
    const int t = c_.thread();
    if (t < n_) shared_.source[t] = t == me_ ? a_.in_part[me_] + span.begin : a_.direct_in ? shared_.in[t] + span.begin : slot(t, me_, s);
    c_.sync();
    Shot::run(c_, a_, !a_.results || a_.direct_out ? a_.out_part[me_] + span.begin : slot(me_, result_slot(), s), shared_.source,
              span.size);
    session_.post(a_.results ? Flag::reduced : Flag::drained, all_, s);
    return true;
  }

  PC_FN bool gather(uint32_t s) {
    if (!a_.results) return true;
    if (a_.fetch) {
      if (!session_.wait(Flag::reduced, all_, s)) return false;
      for (int k = 0; k < n_; ++k) {
        const int q = (me_ + k) % n_;
        if (!a_.out_part[q] || (a_.direct_out && q == me_)) continue;
        const Span span = segment(q, s);
        copy(c_, a_.out_part[q] + span.begin, a_.direct_out ? shared_.out[q] + span.begin : slot(q, result_slot(), s), span.size);
      }
    }
    session_.post(Flag::drained, all_, s);
    return true;
  }

  Ctx& c_;
  const Args& a_;
  Session<Ctx>& session_;
  Shared& shared_;
  const int n_, me_;
  const uint32_t all_;
};

template <class Shot, class Ctx>
PC_FN void two_shot(Ctx& c, const Args& a) {
  Session<Ctx> session(c, a);
  if (session.begin()) TwoShot<Shot, Ctx>(c, a, session).run();
  session.end();
}

}  // namespace pycomm::cuda
