"""The kernels of pycomm.fused in Triton's interpreter: what test_kernels.py runs in a process of its own.

    python kernel_cases.py WORLD_SIZE NAME ..
        prints a line of JSON as each case ends: {"name", "error" (empty: passed), "seconds"}

The interpreter is chosen when a kernel is defined (TRITON_INTERPRET), hence the process; one for all, since
all need the same imports. Each case forks its ranks, which share memory as processes on a node do, and has a
group and a context of its own.
"""

import contextlib
import functools
import json
import mmap
import os
import random
import sys
import time

import tolerance
import torch
import torch.distributed as dist
import torch_ranks
from kernel_faults import FAULTS, QUICK_FAULTS
from kernel_jobs import (
    DTYPES,
    EMPTY,
    GATHER,
    GATHERS,
    MATMULS,
    REDUCE,
    REDUCES,
    SCATTER,
    SCATTERS,
    TILE,
    Job,
    check,
    context_of,
)
from kernel_quick import QUICK
from oracle import ACTIVATIONS, draw

from pycomm import fused
from pycomm.groups import even_sizes


def run_all(rank, world_size, jobs):
    for job in jobs:
        check(job, world_size, rank)


def run_share(rank, world_size, jobs):
    """Jobs that need no peer, shared among the ranks."""
    for job in jobs[rank::world_size]:
        check(job, 1, 0)


def one_shot(job):
    return job._replace(config=job.config._replace(one_shot=True))


# --- many calls on one context --------------------

MIXED = [
    Job(GATHER, n=33, k=20, keep=True, activation="silu"),
    Job(SCATTER, n=40, k=33, activation="swiglu", seed=12),
    Job(REDUCE, n=70, k=20, activation="gelu", seed=8),
    one_shot(Job(REDUCE, n=20, k=9, seed=4)),
    Job(SCATTER, n=97, k=9, sizes=lambda n: (35, 0, 40, 3)[:n], seed=2),
    Job(GATHER, n=9, k=70, sizes=lambda n: (3, 64, 0, 33)[:n]),
    Job(GATHER, n=0, k=20, keep=True),  # no columns: nobody but the keepers waits for the pieces
]


def epochs(rank, world_size):
    """New values and another problem in every call. The block grows several times, by the flags or by the
    staging, and never shrinks.
    """
    blocks = []
    for seed in range(3):
        for job in MIXED:
            check(job._replace(seed=job.seed + 1000 * seed), world_size, rank)
            block = context_of().block
            blocks += [block] if not blocks or block is not blocks[-1] else []
    assert int(context_of().block.local[0]) <= 3 * len(MIXED) and 2 < len(blocks) < len(MIXED)
    for small, large in zip(blocks, blocks[1:], strict=False):
        assert large.flags >= small.flags and large.staging >= small.staging


@contextlib.contextmanager
def slow_posts(delay):
    """Before a word is posted, delay(address of the word) seconds pass."""
    from pycomm.fused.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, signal

    modules = (signal, all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
    post = signal.post

    def slow(word, epoch):
        time.sleep(delay(int(word.handle.data.item())))
        post(word, epoch)

    for module in modules:
        module.post = slow
    try:
        yield
    finally:
        for module in modules:
            module.post = post


def is_mine(rank, address):
    block = context_of().block
    return 0 <= address - int(block.table[rank]) < block.tensor.numel()


def slow_rank(rank, world_size):
    """The last rank posts late what it sends to itself, so that its peers are a launch ahead, with a problem
    whose flags mean other things.

    Staging or flags that launches in a row share would be overwritten by them. [Note: two halves] in
    kernels/signal.py."""
    small = Job(SCATTER, n=32, k=32, sizes=lambda n: (32,) * n)
    wide = small._replace(n=64)
    pairs = [
        (wide, small),
        (Job(REDUCE, k=8), Job(REDUCE, k=8, n=70)),
        (one_shot(Job(REDUCE, k=8)), one_shot(Job(REDUCE, k=8, n=70))),
    ]
    for pair in pairs:
        run_all(rank, world_size, pair)
    late = rank == world_size - 1
    with slow_posts(lambda address: 0.1 if late and is_mine(rank, address) else 0.0):
        for pair in pairs:
            for seed in range(2):
                run_all(rank, world_size, [job._replace(seed=job.seed + seed) for job in reversed(pair)])


def slow_reader(rank, world_size):
    """The last rank takes its time in every launch before it reads; the others must not put the next but
    one's data there.
    """
    from pycomm.fused.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

    modules = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
    jobs = [
        Job(GATHER, n=32, k=8),
        Job(SCATTER, n=32, k=8),
        one_shot(Job(REDUCE, n=32, k=8)),
        Job(REDUCE, n=32, k=8),
    ]
    # Here rank 0 needs nobody's data and would run away, but for `meet`.
    jobs += [
        Job(GATHER, n=32, k=8, sizes=lambda n: (32,) + (0,) * (n - 1)),
        Job(SCATTER, n=32, k=8, sizes=lambda n: (0,) * (n - 1) + (32,)),
    ]
    run_all(rank, world_size, jobs)
    wait_for = matmul_reduce_scatter.wait_for

    def slow(*arguments, **options):
        ahead = wait_for(*arguments, **options)
        time.sleep(0.05)
        return ahead

    if rank == world_size - 1:
        for module in modules:
            module.wait_for = slow
    for job in jobs:
        run_all(rank, world_size, [job._replace(seed=seed) for seed in range(4)])


def any_pace(rank, world_size):
    """Each rank sleeps now and then, other ranks at other times."""
    jobs = [job._replace(seed=job.seed + 1000 * seed) for seed in range(2) for job in MIXED]
    run_all(rank, world_size, MIXED)
    chance = random.Random(rank)
    with slow_posts(lambda _: chance.choice((0.0, 0.0, 0.0, 0.03))):
        run_all(rank, world_size, jobs)


def movers(rank, world_size):
    """Fewer movers than programs, as many, and more."""
    for count in (2, 3, 7):
        for job in (GATHERS[0], SCATTERS[1], REDUCES[0], one_shot(REDUCES[1])):
            check(job._replace(config=job.config._replace(movers=count)), world_size, rank)


def more_programs(rank, world_size):
    """Programs that have nothing to do, and a single one for each role."""
    for programs in (2, 9):
        context_of().programs = programs
        run_all(rank, world_size, [GATHERS[0], SCATTERS[0], REDUCES[1], one_shot(REDUCES[0])])


def bits(rank, world_size):
    """Equal on all ranks, and in a second run with other programs and other ranks slow, also of the
    preactivation.
    """
    for job in (one_shot(REDUCES[0]), REDUCES[1], REDUCES[0], SCATTERS[1]):
        job = job._replace(dtype=torch.float32)
        first = check(job, world_size, rank)
        context_of().programs = 5
        with slow_posts(lambda _: 0.02 * (rank == 0)):
            again = check(job, world_size, rank)
        context_of().programs = 3
        for one, two in zip(first, again, strict=True):
            assert torch.equal(one, two), f"two runs differ: {job}"
            if job.op == REDUCE:
                everyone = [torch.empty_like(one) for _ in range(world_size)]
                dist.all_gather(everyone, one)
                assert all(torch.equal(one, other) for other in everyone), f"ranks differ: {job}"


def order_of_sum(rank, world_size):
    """2^24 + 1 - 2^24 is 0 in fp32 and in order of rank; it would be 1 if a sum began with rank 1 or 2. A
    fourth rank adds 0.
    """
    from pycomm.fused import launch

    value = (2.0**24, 1.0, -(2.0**24), 0.0)[rank]
    ones = torch.ones(1, 40)
    for op, config in ((SCATTER, TILE), (REDUCE, TILE), (REDUCE, TILE._replace(one_shot=True))):
        job = Job(op, k=1, bias=False, sizes=lambda n: (40,) * n, config=config)
        rows = job.problem(world_size, rank).m
        out, _ = getattr(launch, op)(
            job.problem(world_size, rank), context_of(), torch.full((rows, 1), value), ones, None, config
        )
        assert (out == 0).all(), f"{op}: {out.unique().tolist()}"


def own_widths(rank, world_size):
    """Each rank has a part of a weight of its own size: columns where a is gathered, else rows."""
    widths = (40, 9, 33, 64)[:world_size]
    jobs = [Job(GATHER, k=24, activation="gelu", keep=True), Job(SCATTER), Job(REDUCE), one_shot(Job(REDUCE))]
    run_all(rank, world_size, [job._replace(widths=widths) for job in jobs])


# --- what is written outside of the results --------------------


def staging(rank, world_size):
    """Of the block only the flags and the bytes that were asked for are written, in the half of the
    launch.
    """
    context = context_of()
    asked, written, enter = [], [], context.enter
    context.enter = lambda *arguments: (asked.append(arguments[2:]), enter(*arguments))[1]
    full = Job(GATHER, n=8, k=8, sizes=lambda n: (32,) * n)  # the last piece ends where the staging ends
    jobs = [
        full,
        GATHERS[1],
        GATHERS[3],
        SCATTERS[1],
        SCATTERS[4],
        REDUCES[1],
        REDUCES[2],
        one_shot(REDUCES[1]),
    ]
    run_all(rank, world_size, jobs)
    context.grow(context.block.flags + 1, context.block.staging + 1)
    for job in jobs:
        block = context.block
        words = 4096  # hello and fingerprints, before the first half
        for half in range(2):
            start = block.staging_offset + half * block.half
            block.tensor[start : start + block.staging] = 171
        before = block.tensor.clone()
        dist.barrier()
        check(job, world_size, rank)
        dist.barrier()
        (flags, nbytes), epoch = asked[-1], int(block.local[0])
        start = block.staging_offset + (epoch & 1) * block.half
        changed = (block.tensor != before).nonzero().flatten() - start
        outside = changed[(changed >= nbytes) | (changed < -4 * flags)] + start
        assert (outside < words).all(), (
            f"{job}: byte {outside.max()} of the block was written, {start} + {nbytes} were asked for"
        )
        written += [int((changed >= 0).any()), int(((changed < 0) & (changed >= -4 * flags)).any())]
    assert sum(written) > len(written) // 2, "the block was hardly written"


def far_apart(rank, world_size):
    """Offsets beyond 2^31 elements: rows of a and b, columns of b. The memory between them is never
    touched.
    """
    from pycomm.fused import launch

    far = 2**27  # elements between rows: 33 of them are 2^32 apart
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which the module mmap has from Python 3.13 on
    memory = mmap.mmap(-1, 34 * far * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    memory = torch.frombuffer(memory, dtype=torch.float16)
    job = Job("matmul", n=33, k=33, sizes=lambda n: (33,), dtype=torch.float16, bias=False)
    x, y = draw(1, 33, 33, dtype=torch.float16), draw(2, 33, 33, dtype=torch.float16)
    wanted = x.double() @ y.double()
    for strides in ((far, 1), (1, far)):
        at = memory.as_strided((33, 33), strides)
        for operands in ((at, y), (x, at)):
            at.copy_(x if operands[0] is at else y)
            out, _ = launch.matmul(job.problem(1, 0), *operands, None, TILE._replace(block_k=16))
            what = f"strides {[operand.stride() for operand in operands]}"
            tolerance.near(what, out, wanted, tolerance.product(x, y), 1)


# --- the public functions --------------------


def note_launches():
    """A list to which the operation of each launch is added from now on."""
    from pycomm.fused import launch

    launched = []

    def noting(kernel):
        return lambda problem, *rest, **options: (
            launched.append(problem.op),
            kernel(problem, *rest, **options),
        )[1]

    for op in (GATHER, SCATTER, REDUCE):
        setattr(launch, op, noting(getattr(launch, op)))
    return launched


def gradients(rank, world_size, activation):
    """Results and gradients of the public functions, all by kernels, against autograd in one process in
    float64.
    """
    os.environ["PYCOMM_FUSED"] = "fused"
    launched = note_launches()
    panels = 2 if activation == "swiglu" else 1
    rows, n, k = 37, 20, 24
    sizes = tuple(even_sizes(rows, world_size))

    def leaf(seed, *shape):
        return draw(seed, *shape, dtype=torch.float32).requires_grad_()

    weights = draw(9, 2, rows, n)
    bias = draw(3, 2 * n * panels, dtype=torch.float32)[::2].requires_grad_()  # its columns are no neighbours

    # all_gather_matmul: a cut along dim 1 of (2, rows, k)
    a, b = leaf(1, 2, rows, k), leaf(10 + rank, n * panels, k)
    mine = [a.detach().split(sizes, 1)[rank].clone().requires_grad_(), b, bias]
    out = fused.all_gather_matmul(mine[0], b.t(), dim=1, sizes=sizes, bias=bias, activation=activation)
    got = torch.autograd.grad(out, mine, weights.float())
    everyone = [
        x.detach().double().requires_grad_()
        for x in [a, *[leaf(10 + r, n * panels, k) for r in range(world_size)], bias]
    ]
    outs = [ACTIVATIONS[activation](everyone[0] @ w.t() + everyone[-1]) for w in everyone[1:-1]]
    wanted = torch.autograd.grad(sum((o * weights).sum() for o in outs), everyone, retain_graph=True)
    wanted_bias = torch.autograd.grad((outs[rank] * weights).sum(), everyone[-1])[0]
    compare(
        "all_gather_matmul",
        [out, *got],
        [outs[rank], wanted[0].split(sizes, 1)[rank], wanted[1 + rank], wanted_bias],
    )

    # the reductions: each rank's part of k
    parts = [(leaf(20 + r, 2, rows, k), leaf(30 + r, n * panels, k)) for r in range(world_size)]
    doubles = [x.detach().double().requires_grad_() for pair in parts for x in pair] + [
        bias.detach().double().requires_grad_()
    ]
    z = sum(doubles[2 * r] @ doubles[2 * r + 1].t() for r in range(world_size)) + doubles[-1]
    whole = ACTIVATIONS[activation](z)
    wanted = torch.autograd.grad((whole * weights).sum(), doubles)
    of_rank = [wanted[2 * rank], wanted[2 * rank + 1], wanted[-1]]
    a, b = parts[rank]
    out = fused.matmul_reduce_scatter(a, b.t(), dim=-2, bias=bias, activation=activation)
    got = torch.autograd.grad(out, [a, b, bias], weights.split(sizes, 1)[rank].float())
    compare("matmul_reduce_scatter", [out, *got], [whole.split(sizes, 1)[rank], *of_rank])
    out = fused.matmul_all_reduce(a, b.t(), bias=bias, activation=activation)
    compare(
        "matmul_all_reduce",
        [out, *torch.autograd.grad(out, [a, b, bias], weights.float())],
        [whole, *of_rank],
    )
    assert launched == [GATHER, SCATTER, SCATTER, GATHER, REDUCE], f"kernels launched: {launched}"


def compare(op, found, wanted):
    for name, actual, right in zip(
        ("result", "grad of a", "grad of b", "grad of bias"), found, wanted, strict=True
    ):
        # Each tensor has hundreds of elements, and its largest is no sum that cancels.
        tolerance.near(f"{name} of {op}", actual.detach(), right.detach(), right.detach(), 16)


# --- the table, and the process --------------------


def _cases():
    tables = {
        "matmul": (run_share, MATMULS),
        "all_gather_matmul": (run_all, GATHERS),
        "matmul_reduce_scatter": (run_all, SCATTERS),
    }
    tables |= {
        "matmul_all_reduce-two_shot": (run_all, REDUCES),
        "matmul_all_reduce-one_shot": (run_all, [one_shot(job) for job in REDUCES]),
    }
    found = {
        f"{name}-{dtype}": functools.partial(body, jobs=[job._replace(dtype=DTYPES[dtype]) for job in jobs])
        for name, (body, jobs) in tables.items()
        for dtype in DTYPES
    }
    found |= {"empty": functools.partial(run_all, jobs=EMPTY)}
    bodies = (
        epochs,
        slow_rank,
        slow_reader,
        any_pace,
        movers,
        more_programs,
        bits,
        order_of_sum,
        own_widths,
        staging,
        far_apart,
    )
    found |= {body.__name__: body for body in bodies}
    return found | {
        f"gradients-{name}": functools.partial(gradients, activation=name)
        for name in (None, "gelu", "swiglu")
    }


CASES = _cases()
LEAST_RANKS = {"order_of_sum": 3}
assert not CASES.keys() & FAULTS.keys() and not QUICK.keys() & (CASES | FAULTS).keys()


def run(name, world_size):
    """What went wrong, or ""."""
    try:
        if name in FAULTS | QUICK_FAULTS:
            (FAULTS | QUICK_FAULTS)[name](world_size)
        else:
            torch_ranks.spawn(max(world_size, LEAST_RANKS.get(name, 2)), (CASES | QUICK)[name])
    except AssertionError as error:
        return str(error) or repr(error)
    return ""


def patch_once():
    """The interpreter exchanges the functions of triton.language at the launch of a kernel and again at each
    call of a function in it, which is half of the time. Once per launch will do."""
    from triton.runtime import interpreter

    patch, execute, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def execute_afresh(self, *arguments, **options):
        done.clear()
        return execute(self, *arguments, **options)

    def patch_if_new(fn):
        if fn not in done:
            done.add(fn)
            return patch(fn)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_if_new, execute_afresh


if __name__ == "__main__":
    torch.set_num_threads(1)
    patch_once()
    from pycomm.fused import launch

    assert launch.interpreted()
    torch_ranks.LIMIT = 40 * (int(sys.argv[1]) - 1)
    for case in sys.argv[2:]:
        start = time.monotonic()
        print(
            json.dumps(
                {"name": case, "error": run(case, int(sys.argv[1])), "seconds": time.monotonic() - start}
            ),
            flush=True,
        )
