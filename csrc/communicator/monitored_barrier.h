// monitored_barrier.h -- a barrier that names who did not come and leaves the group usable.
//
// It lies beside the sequence of the group's operations: a rank that skips it is not one operation behind,
// and a failed one breaks nothing. Three words per rank in shared memory (transport/layout.h) carry it:
//
//   rank r   barrier_calls = call                its calls so far, to tell who has come since a round began
//            barrier_arrival = call * 2          "I am in my call number `call`"
//   rank 0   sees all arrivals, takes each one   call * 2 -> call * 2 + 1, by compare-and-exchange
//            all taken                           of each: arrival = 0, barrier_verdict = call * 2 + 1, passed
//            its time is up                      of each: arrival = 0, barrier_verdict = call * 2, failed
//   rank r   its time is up                      call * 2 -> 0, by compare-and-exchange; where that fails,
//                                                rank 0 has taken it, and the verdict follows
//
// So either all pass or none does: rank 0 gives back what it has taken if one rank withdrew meanwhile. A
// verdict carries the number of the call that it answers, so no later call takes it for its own. Stores that
// somebody may sleep for are followed by notify (wait.h).
//
// Over hosts the words are in the board of each host (HostsSide::barrier_board). The leaders carry those of
// ranks on other hosts than rank 0's to its host, where they look like those of ranks there, and the verdicts
// back (hosts/speaker.h). A rank elsewhere whose time is up cannot take its arrival back itself: it asks for
// it, and is answered with the verdict of rank 0 if that was first, else with a failed one and who was
// missing. A host whose leader has closed the group hears nothing more: so the leader's verdict goes out
// behind those of its host, and who then has none fails at once. Cost: some milliseconds more, up to 0.1 s.
//
// What lost: messages with tags of their own (an arrival that nobody takes stays in the channel, and a late
// one is taken for a new one), and the group's own barrier (a time limit breaks the group, and who skips it
// is out of step).
#pragma once

namespace pycomm {

class Communicator;

// Blocks until all ranks have come, at most `timeout` seconds; 0 is taken literally. Throws CommError of kind
// timeout, after which the group is as good as before, or what else ends a wait. The text has our sentence,
// which names all ranks that were missing, and that of Gloo, which on rank 0 names the first of them, or all
// (`wait_all_ranks`), and on the others says that they had come. Operations issued before progress meanwhile.
void monitored_barrier(Communicator& comm, double timeout, bool wait_all_ranks);

}  // namespace pycomm
