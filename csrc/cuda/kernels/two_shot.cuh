// two_shot.cuh -- every rank reduces its own part out of all inputs, then the results are handed round;
// broadcast as scatter and all-gather.
//
//             rank 0            rank 1            rank 2
//   start     a0   b0   c0      a1   b1   c1      a2   b2   c2
//   reduce    A = a0+a1+a2      B = b0+b1+b2      C = c0+c1+c2       reads 2 parts of peers, in rank order
//   hand on   A    B    C       A    B    C       A    B    C
//
// all_reduce hands the results to all, reduce to the root, reduce_scatter to nobody.
//
// Where peers address each other's buffers, a rank stores its result straight into those of all who want it
// (`stores`): one pass, each byte of the inputs is read once and each byte of the outputs written once, and
// no flag is needed in between, as part q of all buffers is touched by rank q alone. Elsewhere results lie in
// a slot of the staging and those who want them fetch them (`results`, `fetch`).
//
// Cost per rank: (n-1)/n * nbytes read from peers and as much written to (or read from) them; every link
// carries the same, where a root that reduced or sent all alone would be n-1 times slower. copy_two_shot is
// the same with "copy from the root" as the first shot. Source: Rabenseifner 2004.
//
// A slice goes through the staging in segments (layout.h). What orders them, for each block by itself; step s
// uses half s & 1:
//
//               wait for (of all)    then                                                       post (to all)
//   fill(s)     drained(s-2)         nobody reads this half any more: copy own inputs of the    filled(s)
//                                    other parts into it
//   reduce(s)   filled(s)            reduce own part, into the result slot or where it is       reduced(s)
//                                    wanted
//   gather(s)   reduced(s)           copy their results to out                                  drained(s)
//
// Without results to fetch there is no gather, and reduce(s) posts drained(s). fill(s+1) runs before
// reduce(s), so that the peers' inputs of the next segment are there when this one is done. Inputs that peers
// address (direct_in) are not filled; then, and with no result slot, a slice is one segment. Since peers read
// and write the caller's own buffers, the operation ends with wait drained of all.
#pragma once

#include "movement.cuh"
#include "session.cuh"

namespace pycomm::cuda {

// The first shot of a reduction, and of a broadcast: into all targets, the own one first if it is among them.
template <class T, ReduceOp op>
struct Reduce {
  template <class Ctx>
  PC_FN static void run(Ctx& c, const Args& a, Targets targets, Sources sources, uint64_t nbytes) {
    reduce<T, op>(c, a, targets, sources, a.group.world_size, nbytes);
  }
};
struct CopyFromRoot {
  template <class Ctx>
  PC_FN static void run(Ctx& c, const Args& a, Targets targets, Sources sources, uint64_t nbytes) {
    for (int i = 0; i < targets.count; ++i) {  // once over the link from the root, then on from here
      copy(c, targets.data[i], i == 0 ? sources[a.root] : targets.data[0], nbytes);
      c.sync();
    }
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
    const bool peers_touch_buffers = a_.direct_in || (a_.stores & ~(1u << me_));
    if (last == 0 || !(a_.stages & stage_end) || !peers_touch_buffers) return true;
    return session_.wait(Flag::drained, all_, last - 1);
  }

 private:
  PC_FN Span segment(int q, uint32_t s) const {
    return segment_of(a_.in_bytes[q], c_.block(), c_.blocks(), a_.segment_bytes, s);
  }
  PC_FN std::byte* slot(int owner, int index, uint32_t s) const {
    return slot_of(a_, owner, c_.block(), index, s);
  }
  PC_FN int result_slot() const { return a_.slots - 1; }
  // Of rank t among the targets: the own one first, the others by rank. place_of(world_size) is their number.
  PC_FN int place_of(int t) const {
    if (t == me_) return 0;
    int place = a_.stores >> me_ & 1;
    for (int p = 0; p < t; ++p) place += p != me_ && (a_.stores >> p & 1);
    return place;
  }

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
    if (t < n_)
      shared_.source[t] = t == me_       ? a_.in_part[me_] + span.begin
                          : a_.direct_in ? shared_.in[t] + span.begin
                                         : slot(t, me_, s);
    if (t < n_ && (a_.stores >> t & 1))
      shared_.target[place_of(t)] =
          t == me_ ? a_.out_part[me_] + span.begin : const_cast<std::byte*>(shared_.out[t]) + span.begin;
    if (t == 0 && a_.results) shared_.target[0] = slot(me_, result_slot(), s);
    c_.sync();
    Shot::run(c_, a_, {shared_.target, a_.results ? 1 : place_of(n_)}, shared_.source, span.size);
    session_.post(a_.results ? Flag::reduced : Flag::drained, all_, s);
    return true;
  }

  PC_FN bool gather(uint32_t s) {
    if (!a_.results) return true;
    if (a_.fetch) {
      if (!session_.wait(Flag::reduced, all_, s)) return false;
      for (int k = 0; k < n_; ++k) {
        const int q = (me_ + k) % n_;
        const Span span = segment(q, s);
        if (a_.out_part[q]) copy(c_, a_.out_part[q] + span.begin, slot(q, result_slot(), s), span.size);
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
