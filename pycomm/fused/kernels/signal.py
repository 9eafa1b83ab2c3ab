"""How programs of different ranks tell each other that data is there: words in shared memory, and the number
of the launch.

Every rank has a block of memory that all ranks have mapped (context.py). `table` holds its address for each
rank, as seen from here:

    hello[rank]             this launch has begun on `rank`
    fingerprint[2][rank]    of what `rank` computes in even and odd launches
    halves[2]               used in turn by even and odd launches:
        flags               one for each tile or piece that travels; what they mean, the operation says
        staging             the tiles or pieces

All but the staging are words (int32). Flags are counted from the staging backwards, so that a kernel needs
one address for both.

and words of its own, `local`: the number of the last launch (epoch), programs that have ended, whether a wait
has failed.

A word is set to the epoch by whoever wrote the data, and waited for as "at least this epoch". Words only
grow, so nothing is ever reset, and the epoch is read from memory, not passed in, so that a replayed CUDA
graph goes on counting.

[Note: order of data and signal]
    writer   all threads store data | barrier | one thread: release at system scope
    reader   one thread: acquire at system scope | barrier | all threads load data
Without the writer's barrier only the data of the one thread is ordered before the signal: Triton up to 3.8
puts none before an atomic of one element. Without "sys" the order holds on one GPU only. A plain load in the
waiting loop would be moved out of it, hence the atomic; adding zero with acquire compiles to a load.
tests/fused/ptx_check.py looks for all of this in the compiled kernels.

[Note: two halves] A rank in launch e + 2 overwrites what its peers read in launch e. It may, because in
launch e + 1 it has waited for hello of all ranks (`meet`), and a rank says hello in e + 1 only when its own
launch e has ended. In launch e + 1 it may not: a peer may be in launch e still. So the flags have halves as
well: if e + 1 is another problem, the same index is a tile of another rank there, whose signal would be taken
for this one's, or be overwritten by it.

[Note: other problems] Peers in launch e have the fingerprint of e in their half until all have ended e, so
`meet` compares it once hello is there: ranks that compute different things find out even where every wait of
theirs happens to be satisfied.

[Note: who may wait] A program waits only for programs with lower ids, on any rank, or for earlier launches;
programs that produce never wait. So a grid that is larger than the machine, or that runs one program after
the other as the interpreter does, still ends.

[Note: bounded waits] A wait gives up after `limit` looks. It then notes in `record`, in host memory, for whom
it waited; later waits of the rank give up at once, the launch ends with wrong results, and the host raises
the error.
"""

import triton
import triton.language as tl

MAX_RANKS = tl.constexpr(32)
EPOCH, ENDED, FAILED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # indices in `local`
HELLO, DATA, RESULT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # what was waited for, in `record`
OTHER = tl.constexpr(4)  # likewise: the peer computes something else

# Arguments that Triton shall not make constants of where they happen to be 1 or divisible by 16: one kernel
# for all ranks and problems.
OF_A_RANK = ("fingerprint", "limit", "rank")


@triton.jit
def words_of(table, rank):
    return tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def flag_of(table, rank, staging, index):
    """A rank's flag in the half whose staging is `staging` bytes behind the start of its block."""
    return (tl.load(table + rank) + staging).to(tl.pointer_type(tl.int32)) - 1 - index


@triton.jit
def staging_of(table, rank, offset, DTYPE: tl.constexpr):
    """Pointer into a rank's block, `offset` bytes behind its start; a multiple of 16, which the compiler
    cannot know of a loaded address."""
    return tl.multiple_of((tl.load(table + rank) + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def post(word, epoch):
    """Makes what this program has stored visible to whoever sees the word. [Note: order of data and
    signal]
    """
    tl.debug_barrier()
    tl.atomic_xchg(word, epoch, sem="release", scope="sys")


@triton.jit
def wait_for(word, epoch, local, record, limit, peer, WHAT: tl.constexpr):
    """Until the word has come to this epoch, at most `limit` looks; returns by how much it is ahead. `peer`:
    who will set it.
    """
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    left = tl.where(tl.atomic_add(local + FAILED, 0, sem="relaxed", scope="gpu") == 0, limit, 0)
    while (seen - epoch < 0) & (left > 0):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        left -= 1
    if seen - epoch < 0:
        tl.atomic_xchg(local + FAILED, 1, sem="relaxed", scope="gpu")
        tl.atomic_cas(record, 0, peer + WHAT * MAX_RANKS, sem="release", scope="sys")
    tl.debug_barrier()
    return seen - epoch


@triton.jit
def begin(table, local, fingerprint, rank, WORLD: tl.constexpr):
    """First in every program; returns the epoch of this launch. Program 0 says hello to all."""
    epoch = tl.load(local + EPOCH) + 1
    if tl.program_id(0) == 0:
        for peer in range(WORLD):
            words = words_of(table, peer)
            tl.store(words + MAX_RANKS * (1 + (epoch & 1)) + rank, fingerprint)
            post(words + rank, epoch)
    return epoch


@triton.jit
def meet(table, local, record, limit, fingerprint, rank, epoch, WORLD: tl.constexpr):
    """In the last program: waits for hello of all ranks [Note: two halves] and compares fingerprints [Note:
    other problems].
    """
    words = words_of(table, rank)
    for peer in range(WORLD):
        ahead = wait_for(words + peer, epoch, local, record, limit, peer, HELLO)
        theirs = tl.load(words + MAX_RANKS * (1 + (epoch & 1)) + peer)
        if (ahead >= 0) & (ahead <= 1) & (theirs != fingerprint):
            tl.store(record + 1, fingerprint)
            tl.store(record + 2, theirs)
            tl.debug_barrier()
            tl.atomic_xchg(record, peer + OTHER * MAX_RANKS, sem="release", scope="sys")


@triton.jit
def finish(local, epoch):
    """Last in every program: the last one of all notes the epoch, which every program has read by then."""
    tl.debug_barrier()
    ended = tl.atomic_add(local + ENDED, 1, sem="acq_rel", scope="gpu")
    if ended == tl.num_programs(0) - 1:
        tl.store(local + ENDED, 0)
        tl.store(local + EPOCH, epoch)
