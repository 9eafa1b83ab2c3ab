// ring.cuh -- all_reduce around a ring: every rank talks to two neighbours only. For machines where links,
// not latency, are scarce and not every pair has one (PCIe).
//
// The buffer is cut into world_size parts. In the first n-1 steps a part travels from the rank after its
// owner around to the owner, and each rank it passes adds its own; in the next n-1 the results travel on,
// from the owner around.
//
//             rank 0            rank 1            rank 2
//   start     a0   b0   c0      a1   b1   c1      a2   b2   c2
//   step 0    a0  [b02] c0      a1   b1  [c01]   [a12] b2   c2
//   step 1   [A]   b02  c0      a1  [B]   c01     a12  b2  [C]     rank r now owns part r
//   step 2-3  A    B    C       A    B    C       A    B    C
//
// Cost per rank: 2(n-1)/n * nbytes sent, all of it to rank+1; 2(n-1) steps. Source: Patarasuk and Yuan, JPDC
// 2009.
//
// Data are pushed into a queue of ring_slots segments in the next rank's arena, since writes to a far memory
// need no answer and reads do. Counters run through the operation, k = 0, 1, ... for each receipt and each
// sending alike (a rank receives as often as it sends):
//
//   filled(k)    of prev: its k-th sending lies in my slot k % ring_slots      without it: old data are added
//   drained(k)   of next: it has taken my k-th sending: the credit             without it: a slot is
//                                                                              overwritten unread
//
// A step takes from one slot and puts into another without a stop in between, so segments follow each other
// around the ring like waves. Partial sums travel as T, so 16-bit types, which must round once, take two_shot
// instead. The order of addition is that of the ring, starting after the owner: the same on all ranks and in
// all runs.
#pragma once

#include "movement.cuh"
#include "session.cuh"

namespace pycomm::cuda {

template <class T, ReduceOp op, class Ctx>
class Ring {
 public:
  PC_FN Ring(Ctx& c, const Args& a, Session<Ctx>& session)
      : c_(c),
        a_(a),
        session_(session),
        shared_(c.template shared<Shared>()),
        n_(a.group.world_size),
        me_(a.group.rank),
        next_((me_ + 1) % n_),
        prev_((me_ + n_ - 1) % n_) {}

  PC_FN void run() {
    uint32_t segments = 0;
    for (int q = 0; q < n_; ++q) {
      const uint32_t count = num_segments(a_.in_bytes[q], c_.block(), c_.blocks(), a_.segment_bytes);
      segments = count > segments ? count : segments;
    }
    for (uint32_t s = 0; s < segments; ++s) {
      if (!send_first(s)) return;
      for (int step = 0; step < 2 * n_ - 2; ++step)
        if (!take(s, step)) return;
    }
  }

 private:
  PC_FN int part_before(int distance) const { return ((me_ - distance) % n_ + n_) % n_; }
  PC_FN Span span(int q, uint32_t s) const {
    return segment_of(a_.in_bytes[q], c_.block(), c_.blocks(), a_.segment_bytes, s);
  }
  PC_FN std::byte* queue(int rank, uint32_t k) const {
    const uint64_t index = static_cast<uint64_t>(c_.block()) * ring_slots + k % ring_slots;
    return a_.group.arena[rank] + a_.group.staging_offset + index * a_.segment_bytes;
  }

  // A free slot at the next rank, for sending number sent_.
  PC_FN bool credit() {
    return sent_ < ring_slots || session_.wait(Flag::drained, 1u << next_, sent_ - ring_slots);
  }

  PC_FN bool send_first(uint32_t s) {
    if (!credit()) return false;
    const int q = part_before(1);
    const Span at = span(q, s);
    const std::byte* own = a_.in_part[q] + at.begin;
    if (c_.thread() == 0) shared_.source[0] = own;  // post() of the step before has seen all threads off it
    c_.sync();
    relay(queue(next_, sent_), 1, at.size, false);
    session_.post(Flag::filled, 1u << next_, sent_++);
    return true;
  }

  // Receipt number taken_: adds or stores, and passes on unless this rank is the last one to need it.
  PC_FN bool take(uint32_t s, int step) {
    const bool adds = step < n_ - 1, passes_on = step < 2 * n_ - 3, completes = step == n_ - 2;
    const int q = adds ? part_before(2 + step) : part_before(1 + step - (n_ - 1));
    if (!session_.wait(Flag::filled, 1u << prev_, taken_)) return false;
    if (passes_on && !credit()) return false;
    const Span at = span(q, s);
    const std::byte* from = queue(me_, taken_);
    std::byte* out = a_.out_part[q] + at.begin;
    if (adds) {
      if (c_.thread() == 0) {
        shared_.source[0] = from;
        shared_.source[1] = a_.in_part[q] + at.begin;
      }
      c_.sync();
      relay(completes ? out : queue(next_, sent_), 2, at.size, completes);
      if (completes && passes_on) {
        c_.sync();
        copy(c_, queue(next_, sent_), out, at.size);
      }
    } else {
      copy(c_, out, from, at.size);
      if (passes_on) copy(c_, queue(next_, sent_), from, at.size);
    }
    if (passes_on) session_.post(Flag::filled, 1u << next_, sent_++);
    session_.post(Flag::drained, 1u << prev_, taken_++);
    return true;
  }

  // n = 1: own input, prepared. n = 2: what came, which is prepared already, plus own input.
  PC_FN void relay(std::byte* to, int n, uint64_t nbytes, bool completes) {
    const uint64_t count = nbytes / sizeof(T);
    bool whole = aligned16(to);
    for (int i = 0; i < n; ++i) whole = whole && aligned16(shared_.source[i]);
    constexpr int width = Pack<T>::size;
    const uint64_t vectors = whole && !(divides_one_by_one<T> && a_.divide) ? nbytes / 16 : 0;
#pragma unroll 1
    for (uint64_t i = c_.thread(); i < vectors; i += c_.threads()) {
      const auto own = unpack<T, 16>(c_.ld16(shared_.source[n - 1] + i * 16));
      Pack<T> came, result;
      if (n == 2) came = unpack<T, 16>(c_.ld16(shared_.source[0] + i * 16));
#pragma unroll
      for (int e = 0; e < width; ++e)
        result.element[e] = step_of(n == 2 ? &came.element[e] : nullptr, own.element[e], completes);
      c_.st16(to + i * 16, repack<U4>(result));
    }
#pragma unroll 1
    for (uint64_t i = vectors * width + c_.thread(); i < count; i += c_.threads()) {
      const T own = c_.template ld<T>(reinterpret_cast<const T*>(shared_.source[n - 1]) + i);
      T came;
      if (n == 2) came = c_.template ld<T>(reinterpret_cast<const T*>(shared_.source[0]) + i);
      c_.template st<T>(reinterpret_cast<T*>(to) + i, step_of(n == 2 ? &came : nullptr, own, completes));
    }
  }

  PC_FN T step_of(const T* came, T own, bool completes) {
    Acc<T> acc = prepare<op>(a_, to_acc(own));
    if (came) acc = combine<op>(to_acc(*came), acc);
    return from_acc<T>(completes ? conclude<op>(a_, acc) : acc);
  }

  Ctx& c_;
  const Args& a_;
  Session<Ctx>& session_;
  Shared& shared_;
  const int n_, me_, next_, prev_;
  uint32_t sent_ = 0, taken_ = 0;
};

template <class T, ReduceOp op, class Ctx>
PC_FN void ring(Ctx& c, const Args& a) {
  Session<Ctx> session(c, a);
  if (session.begin()) Ring<T, op, Ctx>(c, a, session).run();
  session.end();
}

}  // namespace pycomm::cuda
