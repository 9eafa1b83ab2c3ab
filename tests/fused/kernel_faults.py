"""What test_kernels.py breaks on purpose: signals that get lost, ranks that do not come, come with something
else, or die.

Every wait of a kernel is bounded, so each rank's launches end, and its next call raises an error that names
the rank waited for. All other ranks then wait for the one that has raised, and end likewise.
"""

import os
import re
import signal
import time

import torch
import torch_ranks
from kernel_jobs import GATHER, REDUCE, SCATTER, TILE, Job, call, check, context_of

from pycomm.errors import CommError, CommTimeoutError, MismatchError

WAIT = (
    0.2  # seconds that a kernel waits, about; a look of the interpreter takes longer than context.py supposes
)
LIMIT = 15.0  # for all calls of a rank until it has its error
ONE_SHOT = TILE._replace(one_shot=True)


def until_error(job, world_size, rank, calls=4):
    """Calls until one raises: (error, how many calls ended before). What comes then must be the same error,
    at once.
    """
    start = time.monotonic()
    for count in range(calls):
        try:
            call(job, world_size, rank)
        except CommError as error:
            assert time.monotonic() - start < LIMIT, f"{time.monotonic() - start} s until {error}"
            for other in (job, job._replace(n=7)):
                try:
                    call(other, world_size, rank)
                except CommError as again:
                    assert again is error
                else:
                    raise AssertionError(f"a call after {error!r} went on") from None
            return error, count
    raise AssertionError(f"no error in {calls} calls")


def expect(error, kind, peer, *texts):
    assert type(error) is kind, f"{error!r} is no {kind.__name__}"
    assert peer is None or error.peer == peer, f"{error!r} names rank {error.peer}, not {peer}"
    missing = [text for text in texts if text not in str(error)]
    assert not missing, f"{missing} are not in: {error}"


# --- a signal is lost --------------------


def without_signal(rank, world_size, job, module, skipped):
    """The last rank's post number `skipped` to rank 0 in the second launch does not happen."""
    import importlib

    module = importlib.import_module(f"pycomm.fused.kernels.{module}")
    context = context_of()
    check(job, world_size, rank)
    context.timeout = WAIT
    last, posts, post = world_size - 1, [], module.post

    def lossy(word, epoch):
        if 0 <= int(word.handle.data.item()) - int(context.block.table[0]) < context.block.tensor.numel():
            posts.append(word)
            if len(posts) == skipped:
                return
        post(word, epoch)

    if rank == last:
        module.post = lossy
    error, calls = until_error(job, world_size, rank)
    if rank == 0:
        assert calls == 1, f"{calls} launches before the error"
        expect(error, CommTimeoutError, last, f"[rank 0/{world_size}] {job.op} #2", f"of rank {last}")
    else:  # it has all its data, and rank 0 has ended: its launches wait in vain
        expect(error, CommTimeoutError, None if world_size > 2 else 0)
    if rank == last:
        assert len(posts) >= skipped, "nothing was lost"


def lost_signal(world_size):
    torch_ranks.spawn(world_size, without_signal, Job(GATHER, n=32, k=8, keep=True), "all_gather_matmul", 1)
    torch_ranks.spawn(world_size, without_signal, Job(SCATTER, n=40, k=8), "matmul_reduce_scatter", 2)
    torch_ranks.spawn(
        world_size, without_signal, Job(REDUCE, n=40, k=8, config=ONE_SHOT), "matmul_reduce_scatter", 3
    )
    torch_ranks.spawn(
        world_size, without_signal, Job(REDUCE, n=150, k=8, sizes=lambda n: (10,) * n), "matmul_all_reduce", 1
    )


# --- a rank does not come, or dies --------------------


def without_rank(rank, world_size, op):
    """The last rank stays away from a launch; its last problem was another one, which is no mismatch."""
    job, other = Job(op, n=40, k=8), Job(op, n=33, k=8)
    check(job, world_size, rank)
    check(other, world_size, rank)
    context_of().timeout = WAIT
    if rank < world_size - 1:
        error, calls = until_error(job, world_size, rank)
        expect(error, CommTimeoutError, world_size - 1 if world_size == 2 else None, f"{op} #3", "broken")
        assert calls == 1


def absent_rank(world_size):
    for op in (GATHER, SCATTER, REDUCE):
        torch_ranks.spawn(world_size, without_rank, op)


def unheard(rank, world_size):
    """Nothing is waited for but hello: the last rank has no rows, rank 0 needs none of its data."""
    job = Job(GATHER, n=32, k=8, sizes=lambda n: (20,) * (n - 1) + (0,))
    check(job, world_size, rank)
    context_of().timeout = WAIT
    if rank < world_size - 1:
        error, _ = until_error(job, world_size, rank)
        if world_size == 2:
            expect(error, CommTimeoutError, 1, "the launch of rank")
        else:  # a survivor that comes later than WAIT is missed before the absent rank: by its tiles
            expect(error, CommTimeoutError, None)
            assert re.search("(the launch|tiles) of rank", str(error)), str(error)


def absent_without_data(world_size):
    torch_ranks.spawn(world_size, unheard)


def kill_in_the_middle(rank, world_size):
    from pycomm.fused.kernels import matmul_reduce_scatter

    job = Job(SCATTER, n=97, k=8)
    check(job, world_size, rank)
    context_of().timeout = WAIT
    if rank == world_size - 1:
        post, posts = matmul_reduce_scatter.post, []

        def deadly(word, epoch):
            posts.append(word)
            if len(posts) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            post(word, epoch)

        matmul_reduce_scatter.post = deadly
    error, _ = until_error(job, world_size, rank)
    expect(error, CommTimeoutError, world_size - 1 if world_size == 2 else None)


def killed_rank(world_size):
    torch_ranks.spawn(world_size, kill_in_the_middle, expect_deaths=(world_size - 1,))


# --- ranks that compute different things --------------------


def disagree(rank, world_size, job, other, texts):
    """At the first use nothing is launched."""
    mine = other if rank == world_size - 1 else job
    try:
        call(mine, world_size, rank)
    except MismatchError as error:
        expect(
            error,
            MismatchError,
            0 if rank == world_size - 1 else world_size - 1,
            f"[rank {rank}/{world_size}] {mine.op} #0",
            *texts,
        )
    else:
        raise AssertionError("no error")
    assert context_of().block is None


def other_shapes(world_size):
    even = Job(SCATTER, sizes=lambda n: (20,) * n)
    pairs = [
        (even, even._replace(n=41), ("n=40", "n=41")),
        (even, even._replace(dtype=torch.float16), ("float32", "float16")),
        (even, even._replace(sizes=lambda n: (19, *(20,) * (n - 2), 21)), ("sizes=[20,", "sizes=[19,")),
        (even, even._replace(config=TILE._replace(block_m=16)), ("block_m=32", "block_m=16")),
        (even, even._replace(op=REDUCE), (SCATTER, REDUCE)),
        (Job(GATHER, k=8), Job(GATHER, k=9), ("k=8", "k=9")),
        (Job(REDUCE, activation="relu"), Job(REDUCE, activation="silu"), ("relu", "silu")),
        # Whether the preactivation is wanted decides what two-shot sends.
        (Job(REDUCE, activation="relu"), Job(REDUCE, activation="relu", save=False), ("bytes",)),
    ]
    for pair in pairs:
        torch_ranks.spawn(world_size, disagree, *pair)


def cross(rank, world_size, job, other, texts):
    """Both problems are known to all; now the last rank computes another one than the rest."""
    check(job, world_size, rank)
    check(other, world_size, rank)
    context_of().timeout = WAIT
    last = world_size - 1
    mine = other if rank == last else job
    error, calls = until_error(mine, world_size, rank)
    assert calls == 1, f"{calls} launches before the error"
    expect(error, MismatchError, 0 if world_size == 2 and rank == last else None, f"{mine.op} #3", *texts)


def other_problem(world_size):
    # As many tiles of one as of the other: no wait ends in vain.
    ten, nine = Job(REDUCE, sizes=lambda n: (10,) * n), Job(REDUCE, sizes=lambda n: (9,) * n)
    torch_ranks.spawn(world_size, cross, ten, nine, (f"rows={10 * world_size}", f"rows={9 * world_size}"))
    torch_ranks.spawn(world_size, cross, Job(SCATTER, n=40), Job(SCATTER, n=97), ("n=40", "n=97"))
    torch_ranks.spawn(world_size, cross, Job(SCATTER), Job(GATHER), (SCATTER, GATHER))


def crossed(world_size):
    """One of these, for the quick tests."""
    job = Job(REDUCE, n=9, k=8)
    torch_ranks.spawn(world_size, cross, job, job._replace(k=7), ("k=8", "k=7"))


FAULTS = {
    case.__name__: case
    for case in (lost_signal, absent_rank, absent_without_data, killed_rank, other_shapes, other_problem)
}
QUICK_FAULTS = {"absent_without_data": absent_without_data, "crossed": crossed}
