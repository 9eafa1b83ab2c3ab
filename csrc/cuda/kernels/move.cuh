// move.cuh -- everything that moves data without arithmetic: all_gather, broadcast, gather, scatter,
// all_to_all, even or not.
//
// Each rank exposes data, one buffer for all readers (all_gather, gather, broadcast) or one part per reader
// (`distinct`: all_to_all, scatter), and reads what others expose for it. Who exposes to whom and how much is
// in Args: in_bytes[t] is what rank t reads from here, out_bytes[p] what this rank reads from p; both ends
// know both numbers, so each pair runs at its own length and nothing else need be agreed.
//
//   all_gather   exposes in to all, reads from all
//   gather       exposes in to root, root reads from all
//   broadcast    root exposes in to all, all read from root
//   all_to_all   exposes part t to t, reads from all
//   scatter      root exposes part t to t, all read from root
//
// Cost per rank: each byte is read once over the link, one exchange. Reading starts at the next rank, so that
// readers spread over the sources; short parts are read from all at once (copy_several). For broadcast of
// large buffers the root's link is the bottleneck: then copy_two_shot (two_shot.cuh).
//
// Per segment s of a pair, half s & 1 of the staging, for each block by itself:
//
//              wait for                                then                 post
//   fill(s)    drained(s-2), readers that had s-2      copy into the half   filled(s), readers that have s
//   read(s)    filled(s), sources that have s          copy to out          drained(s), these sources
//
// Buffers that peers address (direct_in) are not filled: the header brought their address and the start of
// the peer says that they are ready; then there is one segment, and the operation ends when all readers have
// drained it.
//
// With pairwise sizes (all_to_all) only the two ranks concerned see a difference; all exchange verdicts
// before anything is read (session.cuh).
#pragma once

#include "movement.cuh"
#include "session.cuh"

namespace pycomm::cuda {

template <class Ctx>
class Move {
 public:
  PC_FN Move(Ctx& c, const Args& a, Session<Ctx>& session)
      : c_(c),
        a_(a),
        session_(session),
        shared_(c.template shared<Shared>()),
        n_(a.group.world_size),
        me_(a.group.rank) {}

  PC_FN void run() {
    uint32_t last = 0;
    for (int p = 0; p < n_; ++p) {
      const uint32_t to = segments(a_.in_bytes[p]), from = segments(a_.out_bytes[p]);
      last = to > last ? to : last;
      last = from > last ? from : last;
    }
    const uint32_t end = last < a_.end_segment ? last : a_.end_segment;
    for (uint32_t s = a_.first_segment; s <= end; ++s) {  // fills s, reads s - 1
      if (s < end && !fill(s)) return;
      if (s > a_.first_segment && (a_.stages & stage_gather) && !read(s - 1)) return;
    }
    if (a_.direct_in && (a_.stages & stage_end)) session_.wait(Flag::drained, readers(0), 0);
  }

 private:
  PC_FN uint32_t segments(uint64_t nbytes) const {
    return num_segments(nbytes, c_.block(), c_.blocks(), a_.segment_bytes);
  }
  PC_FN Span span(uint64_t nbytes, uint32_t s) const {
    return segment_of(nbytes, c_.block(), c_.blocks(), a_.segment_bytes, s);
  }

  PC_FN uint32_t readers(uint32_t s) const {
    uint32_t mask = 0;
    for (int t = 0; t < n_; ++t)
      if ((a_.exposes >> t & 1) && segments(a_.in_bytes[t]) > s) mask |= 1u << t;
    return mask;
  }
  PC_FN uint32_t sources(uint32_t s) const {
    uint32_t mask = 0;
    for (int p = 0; p < n_; ++p)
      if ((a_.reads >> p & 1) && segments(a_.out_bytes[p]) > s) mask |= 1u << p;
    return mask;
  }

  PC_FN bool fill(uint32_t s) {
    if (!(a_.stages & stage_fill) || a_.direct_in) return true;
    if (s >= 2 && !session_.wait(Flag::drained, readers(s - 2), s - 2)) return false;
    const uint32_t mask = readers(s);
    for (int k = 1; k < n_ && mask; ++k) {
      const int t = (me_ + k) % n_;
      if (!(mask >> t & 1)) continue;
      const Span at = span(a_.in_bytes[t], s);
      copy(c_, slot_of(a_, me_, c_.block(), a_.distinct ? t : 0, s),
           a_.in_part[a_.distinct ? t : 0] + at.begin, at.size);
      if (!a_.distinct) break;
    }
    session_.post(Flag::filled, mask, s);
    return true;
  }

  PC_FN bool read(uint32_t s) {
    const uint32_t mask = sources(s);
    if (!a_.direct_in && !session_.wait(Flag::filled, mask, s)) return false;
    const int k = c_.thread();
    if (k < n_) {
      const int p = (me_ + k) % n_;
      const Span at = mask >> p & 1 ? span(a_.out_bytes[p], s) : Span{0, 0};
      const std::byte* from = p == me_       ? a_.in_part[a_.distinct ? me_ : 0] + at.begin
                              : a_.direct_in ? shared_.in[p] + at.begin
                                             : slot_of(a_, p, c_.block(), a_.distinct ? me_ : 0, s);
      shared_.source[k] = from;
      shared_.target[k] = a_.out_part[p] + at.begin;
      shared_.nbytes[k] = from == shared_.target[k] ? 0 : at.size;
    }
    c_.sync();
    copy_several(c_, shared_.target, shared_.source, shared_.nbytes, n_);
    session_.post(Flag::drained, mask, s);  // all are done with Shared, too
    return true;
  }

  Ctx& c_;
  const Args& a_;
  Session<Ctx>& session_;
  Shared& shared_;
  const int n_, me_;
};

template <class Ctx>
PC_FN void move(Ctx& c, const Args& a) {
  Session<Ctx> session(c, a);
  if (session.begin()) Move<Ctx>(c, a, session).run();
  session.end();
}

}  // namespace pycomm::cuda
