// session.cuh -- how an operation begins, waits and ends on the device: what all kernels but the messages
// share.
//
//   begin   block 0 writes this rank's header to every peer; every block waits for the headers of all peers
//           and compares
//   post    after all threads of the block are done with their accesses: a flag in the Control of each peer
//           named
//   wait    for the flag of the same block of each peer named; false: stop everything
//   end     the last block of the launch to come here writes the epoch
//
// A header does three things. It says what is being called, so every rank finds any difference before it
// writes a result, and all come to the same verdict, since each sees all headers. It says that the peer's
// kernel has begun, and so, kernels of one rank running one after the other, that its earlier kernels are
// over: whatever they read is free (this is why staging and words need no closing barrier). And it hands over
// the addresses of buffers.
//
// Every block of every rank waits for headers, which block 0 alone sends: so it does not matter that ranks
// which disagree about the call may have launched different grids or different kernels.
//
// [Note: late starts] A rank whose wait ended in vain tells its caller, who may then give its buffers back. A
// kernel that starts late finds the header of such a rank all the same. So a rank that gives up says so to
// every peer (Control::gave_up), before it tells the host; and kernels that touch the buffers of peers look
// whether one has, and at ErrorWord::stop. What a caller does when it has been told is therefore behind the
// word, and a kernel that starts behind that sees it. It tells its host, which may hear of it in no other
// way: the peer may have closed the group in good order. What lies in arenas and in registered memory stays
// until all ranks have let go of it and needs no look. What is left: a peer that came at the last moment is
// at work while a rank gives up. To exclude that, both would have to ask each other in every operation.
//
// Every wait is bounded: by the operation's timeout, and by ErrorWord::stop, which the host sets when a peer
// died or the group was aborted. In launches that do not spin (Args::resident == 0) what is waited for must
// already be there: the host has ordered it by stream memory operations. That is checked, not assumed.
#pragma once

#include "layout.h"

namespace pycomm::cuda {

// Ordering a header is to give. Words that carry their own flags need none (one_shot.cuh), and a
// fence costs a round trip.
enum class Ordering { relaxed, acquire_release };

// The address of what rank `owner` calls by this handle (layout.h).
PC_FN const std::byte* resolve(const Group& group, uint64_t handle, int owner) {
  if (!(handle >> 63)) return reinterpret_cast<const std::byte*>(handle);
  const uint64_t region = handle >> 48 & 0x7fff, offset = handle & ((1ull << 48) - 1);
  return reinterpret_cast<const std::byte*>(group.regions[region * max_ranks + owner]) + offset;
}

// Waits until ready() is true. False: stopped, or too late (`late` says which).
template <class Ctx, class Ready>
PC_FN bool spin(Ctx& c, const Args& a, const void* word, bool& late, const Ready& ready) {
  if (ready()) return true;
  if (!a.resident) return false;
  uint64_t began = 0;
  for (uint32_t round = 1;; ++round) {
    c.relax(word);
    if (ready()) return true;
    if (round % Ctx::polls) continue;
    if (is_stopped(c, a)) return false;
    const uint64_t now = c.now_ns();
    if (!began) began = now;
    if (now - began > a.timeout_ns) {
      late = true;
      return false;
    }
  }
}

// Does the host want every kernel of this rank to end?
template <class Ctx>
PC_FN bool is_stopped(Ctx& c, const Args& a) {
  return c.load_relaxed(&a.group.error->stop, Scope::system);
}

// The first word goes last: whoever waits looks at it.
template <class Ctx>
PC_FN void write_header(Ctx& c, Header& to, const Announcement& call, uint64_t epoch, Ordering ordering) {
  const uint64_t values[Header::num_values / 2] = {call.meta, call.count, call.extra, call.in, call.out};
  const uint32_t mark = static_cast<uint32_t>(epoch);
  auto words_of = [&](int i) {
    return U4{static_cast<uint32_t>(values[i]), mark, static_cast<uint32_t>(values[i] >> 32), mark};
  };
  for (int i = Header::num_values / 2 - 1; i > 0; --i) c.st_words(&to.words[2 * i], words_of(i));
  if (ordering == Ordering::relaxed) return c.st_words(&to.words[0], words_of(0));
  c.store_relaxed(&to.words[1], values[0] >> 32 | epoch << 32, Scope::system);
  const uint64_t first = (values[0] & 0xffffffff) | epoch << 32;
  c.store_release(&to.words[0], first, Scope::system);
}

// Waits for the header of `epoch`. Each word says itself whether it has come, so all are read at once, in one
// round trip. For the ordering that the sender gave with the first word, that one is read again: it has the
// mark, so this reads what was released.
template <class Ctx>
PC_FN bool read_header(Ctx& c, const Args& a, const Header& from, uint64_t epoch, Ordering ordering,
                       Announcement& call, bool& late) {
  constexpr int pairs = Header::num_values / 2;
  const uint32_t mark = static_cast<uint32_t>(epoch);
  U4 words[pairs];
  const bool came = spin(c, a, from.words, late, [&] {
#pragma unroll
    for (int i = 0; i < pairs; ++i) words[i] = c.ld_words(&from.words[2 * i]);
    bool all = true;
#pragma unroll
    for (int i = 0; i < pairs; ++i) all = all && words[i].y == mark && words[i].w == mark;
    return all;
  });
  if (!came) return false;
  if (ordering == Ordering::acquire_release) c.load_acquire(&from.words[0], Scope::system);
  auto value = [&](int i) { return words[i].x | static_cast<uint64_t>(words[i].z) << 32; };
  call = {value(0), value(1), value(2), value(3), value(4)};
  return true;
}

template <class Ctx>
PC_FN void write_call(Ctx& c, Announcement& to, const Announcement& call) {
  c.store_relaxed(&to.meta, call.meta, Scope::system);
  c.store_relaxed(&to.count, call.count, Scope::system);
  c.store_relaxed(&to.extra, call.extra, Scope::system);
}

// Tells the host, unless an older fault of this record still waits to be read. One thread per launch and
// record may call it.
template <class Ctx>
PC_FN void report(Ctx& c, ErrorRecord& record, Fault fault, uint64_t epoch, int peer, uint64_t missing,
                  const Announcement& here, const Announcement& there) {
  if (c.load_relaxed(&record.fault, Scope::system)) return;
  c.store_relaxed(&record.epoch, epoch, Scope::system);
  c.store_relaxed(&record.peer, peer, Scope::system);
  c.store_relaxed(&record.missing, missing, Scope::system);
  write_call(c, record.here, here);
  write_call(c, record.there, there);
  c.store_release(&record.fault, static_cast<uint64_t>(fault), Scope::system);
}

// Shared memory of every kernel: addresses by rank.
struct Shared {
  const std::byte *in[max_ranks], *out[max_ranks];  // that the headers brought
  const std::byte* source[max_ranks];  // of the reduction at hand
  std::byte* target[max_ranks];  // of its result
  uint64_t nbytes[max_ranks];  // move: from each source to its target
};

template <class Ctx>
class Session {
 public:
  PC_FN Session(Ctx& c, const Args& a) : c_(c), a_(a), me_(control_of(a.group, a.group.rank)) {
    uint64_t last = 0;
    if (c.thread() % 32 == 0) last = c.load_relaxed(&me_.epoch, Scope::gpu);
    epoch_ = c.shuffle(last, 0) + 1;
  }

  PC_FN uint64_t epoch() const { return epoch_; }

  PC_CALL void announce(Ordering ordering) {
    const int t = c_.thread();
    if (!(a_.stages & stage_announce) || c_.block() != 0 || !is_peer(t)) return;
    Announcement call = a_.call;
    if (a_.pairwise) call.extra = a_.in_bytes[t];
    call.in = a_.in_handle[t];
    call.out = a_.out_handle[t];
    write_header(c_, control_of(a_.group, t).headers[epoch_ & 1][a_.group.rank], call, epoch_, ordering);
  }

  // True: all ranks make the same call, and peers' buffers are in the block's Shared.
  PC_CALL bool compare(Ordering ordering) {
    Shared& shared = c_.template shared<Shared>();
    const int t = c_.thread();
    bool late = false, came = true, same = true, other_call = false, stopped = false, left = false;
    // See [Note: late starts]; beside the loads of headers.
    if (t == a_.group.rank && touches_peers()) stopped = is_stopped(c_, a_);
    if (is_peer(t)) {
      Announcement call;
      if (touches_peers()) left = gave_up(t);
      came = read_header(c_, a_, me_.headers[epoch_ & 1][t], epoch_, ordering, call, late);
      if (came) {
        same = differs(call, t) == false;
        other_call = call.meta != a_.call.meta || call.count != a_.call.count;
        shared.in[t] = resolve(a_.group, call.in, t);
        shared.out[t] = resolve(a_.group, call.out, t);
      }
    }
    if (c_.sync_or(!came || stopped || left)) {
      const bool known = c_.sync_or(stopped);  // by the host
      tell_peers();
      if (c_.sync_or(left) && !known) blame(Fault::gave_up, [&](int p) { return !gave_up(p); });
      else if ((c_.sync_or(late) || !a_.resident) && !known)
        blame(absence(), [&](int p) { return header_came(p); });
      return false;
    }
    bool bad = c_.sync_or(!same);
    if (bad && reports()) report_mismatch();
    // Of another call every rank has seen the header, and who made it may share no verdicts.
    if (a_.pairwise && !c_.sync_or(other_call)) bad = share_verdict(bad, late);
    return !bad;
  }

  // The usual start. In a launch that only fills, the peers' headers need not be there yet.
  PC_CALL bool begin() {
    announce(Ordering::acquire_release);
    const bool reads_peers =
        a_.resident || (a_.stages & (stage_verdict | stage_reduce | stage_gather | stage_end));
    return !reads_peers || compare(Ordering::acquire_release);
  }

  // The data of `peer`, which carry their own flags, did not come: for the one thread that waited.
  PC_CALL void give_up(int peer, bool late) {
    if (late || !a_.resident) report(c_, record(), absence(), epoch_, peer, 1ull << peer, a_.call, a_.call);
  }

  // Flag `flag` of step `step` (from 0) for this block, to the ranks in `peers`. Everything the block did
  // before is ordered before it.
  PC_CALL void post(Flag flag, uint32_t peers, uint32_t step) {
    c_.sync();
    const int t = c_.thread();
    if (is_peer(t) && (peers >> t & 1))
      c_.store_release(&control_of(a_.group, t).flags[static_cast<int>(flag)][c_.block()][a_.group.rank],
                       value_of(step), Scope::system);
  }

  // Until the ranks in `peers` have posted `flag` of `step` or a later one. What they did before is ordered
  // before what follows.
  PC_CALL bool wait(Flag flag, uint32_t peers, uint32_t step) {
    const int t = c_.thread();
    bool late = false, came = true;
    if (is_peer(t) && (peers >> t & 1)) {
      const uint64_t* word = &me_.flags[static_cast<int>(flag)][c_.block()][t];
      came = spin(c_, a_, word, late, [&] { return c_.load_acquire(word, Scope::system) >= value_of(step); });
    }
    if (!c_.sync_or(!came)) return true;
    tell_peers();
    if (c_.sync_or(late) || !a_.resident)
      blame(absence(), [&](int p) {
        return !(peers >> p & 1) || c_.load_relaxed(&me_.flags[static_cast<int>(flag)][c_.block()][p],
                                                    Scope::system) >= value_of(step);
      });
    return false;
  }

  // Every block must come here last, whatever went wrong.
  PC_CALL void end() {
    if (!(a_.stages & stage_end) || c_.thread() != 0) return;
    if (c_.add(&me_.ticket, 1, Scope::gpu) + 1 != static_cast<uint64_t>(c_.blocks())) return;
    c_.store_relaxed(&me_.ticket, 0, Scope::gpu);
    c_.store_relaxed(&me_.epoch, epoch_, Scope::gpu);
  }

  PC_FN bool is_peer(int t) const { return t < a_.group.world_size && t != a_.group.rank; }

 private:
  PC_FN uint64_t value_of(uint32_t step) const { return epoch_ << step_bits | (step + 1); }

  // Buffers of peers, that is, not only arenas.
  PC_FN bool touches_peers() const {
    return a_.direct_in || (a_.stores & ~(1u << a_.group.rank)) || a_.multicast_out;
  }

  PC_FN bool differs(const Announcement& call, int peer) const {
    return call.meta != a_.call.meta || call.count != a_.call.count ||
           call.extra != (a_.pairwise ? a_.out_bytes[peer] : a_.call.extra);
  }

  PC_FN Fault absence() const { return a_.resident ? Fault::timeout : Fault::protocol; }
  PC_FN bool gave_up(int peer) { return c_.load_relaxed(&me_.gave_up[peer], Scope::system); }

  PC_FN bool header_came(int peer) {
    return c_.load_relaxed(&me_.headers[epoch_ & 1][peer].words[0], Scope::system) >> 32 ==
           (epoch_ & 0xffffffff);
  }

  // A resident operation may have a second launch (close), which must not report again what the host may have
  // read already. In stream order a mismatch breaks the group, since ranks that disagree exchange unequally
  // often; so it is told at once.
  PC_FN bool reports() const {
    return (!a_.resident || (a_.stages & stage_announce)) && c_.block() == 0 && c_.thread() == 0;
  }
  PC_FN ErrorRecord& record() const { return a_.group.error->records[0]; }

  PC_FN void report_mismatch() {
    for (int p = 0; p < a_.group.world_size; ++p) {
      if (p == a_.group.rank) continue;
      Announcement there, here = a_.call;
      bool late = false;
      if (!read_header(c_, a_, me_.headers[epoch_ & 1][p], epoch_, Ordering::relaxed, there, late) ||
          !differs(there, p))
        continue;
      if (a_.pairwise) here.extra = a_.out_bytes[p];
      report(c_, record(), Fault::mismatch, epoch_, p, 0, here, there);
      return;
    }
  }

  // That this rank waits no longer. Whoever calls it has a barrier of the block behind it, and then tells the
  // host by a release.
  PC_FN void tell_peers() {
    const int t = c_.thread();
    if (is_peer(t))
      c_.store_relaxed(&control_of(a_.group, t).gave_up[a_.group.rank], uint64_t{1}, Scope::system);
  }

  // One block tells the host whom it misses. Blocks may do so at once: then the first is heard, or parts of
  // several, all true.
  template <class Came>
  PC_FN void blame(Fault fault, const Came& came) {
    if (c_.thread() != 0) return;
    uint64_t missing = 0;
    int first = 0;
    for (int p = a_.group.world_size - 1; p >= 0; --p)
      if (p != a_.group.rank && !came(p)) {
        missing |= 1ull << p;
        first = p;
      }
    report(c_, record(), fault, epoch_, first, missing, a_.call, a_.call);
  }

  // A difference between two ranks' sizes is seen by these two alone, so all tell all. True: somebody found
  // one.
  PC_FN bool share_verdict(bool bad, bool& late) {
    const int t = c_.thread();
    if ((a_.stages & stage_verdict) && c_.block() == 0 && is_peer(t))
      c_.store_release(&control_of(a_.group, t).verdicts[epoch_ & 1][a_.group.rank], epoch_ << 1 | bad,
                       Scope::system);
    if (!(a_.stages & stage_gather)) return bad;
    bool came = true, theirs = false;
    if (is_peer(t)) {
      const uint64_t* word = &me_.verdicts[epoch_ & 1][t];
      uint64_t value = 0;
      came = spin(c_, a_, word, late, [&] {
        value = c_.load_acquire(word, Scope::system);
        return value >> 1 == epoch_;
      });
      theirs = came && (value & 1);
    }
    if (c_.sync_or(!came)) {
      tell_peers();
      if (c_.sync_or(late))
        blame(absence(), [&](int p) {
          return c_.load_relaxed(&me_.verdicts[epoch_ & 1][p], Scope::system) >> 1 == epoch_;
        });
      return true;
    }
    const bool others = c_.sync_or(theirs);
    if (others && !bad && reports()) report_elsewhere();
    return bad || others;
  }

  PC_FN void report_elsewhere() {
    for (int p = 0; p < a_.group.world_size; ++p)
      if (p != a_.group.rank && (c_.load_relaxed(&me_.verdicts[epoch_ & 1][p], Scope::system) & 1)) {
        report(c_, record(), Fault::mismatch, epoch_, p, 0, a_.call, a_.call);
        return;
      }
  }

  Ctx& c_;
  const Args& a_;
  Control& me_;
  uint64_t epoch_;
};

}  // namespace pycomm::cuda
