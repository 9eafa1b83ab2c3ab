"""How a group that spans hosts and has lost ranks agrees on who is left, without a store:
Communicator.shrink(). On one host the ranks agree in the memory that they share (csrc/transport/survivors.h);
here by messages.

Every rank of such a group has a point: a socket that listens as long as the group, and a thread of the
process that answers, whatever the rank does. All ranks know all points since the group was made
(hosts/records.py), so no store is needed, and no host is special. Each pair of ranks also has a tie: a
connection that shows whether a rank has died.

    rank 0 (killed)      rank 1               rank 2               rank 3
                         shrink()             shrink()             computes
    tie: FIN      -----> looks at all <-----> looks at all ------> point: "lives, has not come"

    ties.py         which deaths are certain
    door.py         who may speak to a port
    points.py       the point, and the thread that answers
    slots.py        what a point remembers, so that all decide alike
    survey.py       what a rank in shrink() sees of all others
    store.py        values in a point, where the survivors meet
    agreement.py    rounds: who is left, and whether the new group was made
    shrinking.py    the new group

[Note: what is seen of a rank]

    gone       its tie has ended as that of a dead process does (ties.py). Certain, and final
    left       it has closed the group and says so. Certain, and final
    here       it is in shrink()
    absent     it answers, and is not: waited for until the time limit, and then named
    stopped    a rank of its own host sees its process stopped (SIGSTOP) for 0.2 s. It may wake up
    silent     nothing was heard for PYCOMM_HOST_TIMEOUT, or its port refuses for so long: its host is lost,
               or the link, or it is stopped and no rank of its host can say so. It may live, and hear others.
               A process of the own host that runs is never silent, as it may wait for a processor: it is what
               it was, or not heard yet. If it hangs it is named at the time limit

[Note: two sides] Hosts that cannot reach each other look dead to each other, and two groups that both go on
would train two models. So ranks that are stopped or silent are left out by a quorum alone:

    more than half of the ranks of the group, or half of them with the lowest; `exclude` is not counted

Two such sets have a rank in common. Where all others are gone or have left, no quorum is needed: they cannot
go on anywhere. The ranks of a side without a quorum get PeerError, which says so; `exclude` with the others'
numbers lets them go on, as the caller then knows that those do not.

[Note: rounds] What is decided is a list of words, the same on all ranks (slots.py); word 1, 2, 3 ...

    members 0 2 3, store 0 the verdict: the ranks that are here, where nobody is absent
    formed                 all members have the new group: this one is done
    over                   a member was lost before: a verdict again
    failed, why            time is up, or ranks exclude different ones, or one failed by itself: all raise it,
                           those too that are here and still listen to a silent one that may know of words

The lowest rank that is here proposes; the others do so too where nothing is decided for a while, since two
that propose at once lose time and nothing else. Between verdict and outcome the members make the new group,
in the store that the point of the proposer is (store.py). What can go wrong:

    - The proposer dies before its verdict is decided: the next one proposes. After: it is a member that is
      lost, and the round is over. It had the store, which nobody needs then.
    - A rank is in a verdict and gives up (its time is up, Ctrl-C): its point says "absent" again, and the
      round is over for the others.
    - A rank that was stopped wakes up: the points of the others say formed, also after they have closed the
      group, for as long as their processes live. It raises AbortedError.
    - One member knows that the group is formed and another is cut off before it hears so: that one raises at
      its time limit, and is lost to the group, which finds it silent.
    - A whole host dies with its kernel: silent, so a quorum is needed.
    - Garbage on the port: a connection that does not begin with the word of this point is closed (door.py).

Cost: each rank has a tie to each other one, and in shrink() a second connection, on which it asks every
10 ms; a decision takes two exchanges with all. Source of slots: Lamport, Paxos made simple (2001), with the
quorum above.

What lost: one leader per host, who speaks for its host: less connections, but its death in the middle needs a
second agreement inside the host. Asking a store: it may be gone with its host, and a launcher's is unknown
here. A majority alone: two hosts could not lose one.
"""

from pycomm.survivors.points import Place, Point

__all__ = ["Place", "Point"]
