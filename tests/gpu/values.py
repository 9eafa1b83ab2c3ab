"""Runs the matrix of cases.py and compares every rank's result with tests/oracle.py, on the host.

Values are small whole numbers, exact in every dtype, so results must be equal; cases with `random` allow
rounding, but not between ranks: all must hold the same bits. Around every buffer, and between the elements of
a strided one, lie guards that must be unchanged.
"""

import functools
import threading
import zlib

import oracle
import torch

import pycomm
from gpu import cases
from gpu.ranks import describe, settle

GUARD = 77
EDGE = (
    64  # guards before and after a buffer: in bytes a multiple of every alignment that a kernel distinguishes
)
FACTOR = 0.5  # of premul_sum
MAX_FAILURES = 5  # recorded for a block; the others are counted
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}
_lock = threading.Lock()


class Buffer:
    """Values in a layout on a device, with guards. Built on the host, so that only copies run on
    the device.
    """

    def __init__(self, values, layout, on):
        count = values.numel()
        self.cut = {
            "plain": slice(EDGE, EDGE + count),
            "offset": slice(EDGE + 1, EDGE + 1 + count),
            "strided": slice(EDGE, EDGE + 2 * count, 2),
        }[layout]
        self.guards = torch.full((2 * EDGE + 2 * count,), GUARD, dtype=torch.float32).to(values.dtype)
        base = self.guards.clone()
        base[self.cut] = values
        self.base = base.to(on)
        self.view = self.base[self.cut]

    def read(self):
        """(values, whether the guards are unchanged). Waits for the stream."""
        base = self.base.cpu().clone()
        values = base[self.cut].clone(memory_format=torch.contiguous_format)
        base[self.cut] = self.guards[self.cut]
        return values, torch.equal(base.view(torch.uint8), self.guards.view(torch.uint8))


def numbers(case, n, rank):
    """The input of a rank: count elements, or n chunks of count."""
    chunks = n if case.op in ("reduce_scatter", "all_to_all", "scatter") else 1
    generator = torch.Generator().manual_seed(1000 * rank + case.count % 997)
    dtype = getattr(torch, case.dtype)
    if case.random:
        return torch.randn(chunks * case.count, generator=generator, dtype=torch.float64).to(dtype)
    drawn = torch.randint(0, 5, (chunks * case.count,), generator=generator)
    if case.redop == "product" and case.op in cases.REDUCING:
        drawn = 1 + drawn % 2
    if case.redop == "premul_sum":
        drawn = 2 * drawn
    if case.redop == "avg":
        drawn = n * (drawn % 2)  # the sum of 8 ranks fits into int8
    return drawn.to(torch.float32).to(dtype)


@functools.lru_cache(maxsize=4)
def _prepare(case, n):
    x = [numbers(case, n, rank) for rank in range(n)]
    return x, reduced(x, case.redop, getattr(torch, case.dtype)) if case.op in cases.REDUCING else None


def prepare(case, n):
    """(inputs of all ranks, their reduction). Ranks that are threads share them."""
    with _lock:
        return _prepare(case, n)


def reduced(parts, redop, dtype):
    """The reduction of all inputs; floats and complex numbers in f64, rounded once."""
    rows = torch.stack(parts)
    if dtype.is_floating_point or dtype.is_complex:
        rows = rows.to(torch.complex128 if dtype.is_complex else torch.float64)
    return oracle.reduced(redop, rows, FACTOR).to(dtype)


def expected(case, rank, x, reduction):
    """What `rank` must hold, from the inputs of all ranks and their reduction. None: it gets nothing."""
    return oracle.collective(case.op, rank, x, reduction, case.root)


def call(comm, case, x, out):
    """The operation on tensors. out is x where the case is in place."""
    op = pycomm.premul_sum(FACTOR) if case.redop == "premul_sum" else case.redop
    more, target = {"algorithm": case.algorithm}, {} if case.in_place else {"out": out}
    match case.op:
        case "all_reduce":
            comm.all_reduce(x, op, **target, **more)
        case "reduce":
            comm.reduce(x, case.root, op, **target, **more)
        case "reduce_scatter":
            comm.reduce_scatter(x, out, op, **more)
        case "broadcast":
            comm.broadcast(x, case.root, **more)
        case "all_gather":
            comm.all_gather(x, out, **more)
        case "all_to_all":
            comm.all_to_all(x, out, **more)
        case "gather":
            comm.gather(x, out if comm.rank == case.root else None, case.root, **more)
        case "scatter":
            comm.scatter(x if comm.rank == case.root else None, out, case.root, **more)
        case "send_recv":
            work = comm.send(x, (comm.rank + 1) % comm.world_size, async_op=True)
            comm.recv(out, (comm.rank - 1) % comm.world_size)
            work.wait()


def run_case(comm, check, case):
    """(problem or "", reason of a refusal or ""). Raises CommError when the group cannot go on."""
    n, rank = comm.world_size, comm.rank
    x, reduction = prepare(case, n)
    want = expected(case, rank, x, reduction)
    layout = (
        "plain" if case.op in ("gather", "scatter") else case.layout
    )  # their array of all parts must be contiguous
    start = torch.zeros_like(x[rank]) if case.op == "broadcast" and rank != case.root else x[rank]
    send = Buffer(start, layout, check.on)
    inside = case.in_place or case.op == "broadcast"
    recv = (
        send if inside else Buffer(x[rank][:0] if want is None else torch.zeros_like(want), layout, check.on)
    )
    target = recv.view
    if case.op == "reduce" and not inside and want is None:
        target = torch.empty_like(send.view)
    settle(check, comm)
    try:
        call(comm, case, send.view, target)
    except (ValueError, TypeError, NotImplementedError) as error:
        return "", describe(error)
    got, guarded = recv.read()
    comm.barrier()
    if want is None:
        want, (got, guarded) = x[rank], send.read()
    return _compare(comm, case, got, want, guarded), ""


def _compare(comm, case, got, want, guarded):
    if not guarded:
        return "bytes beside the buffer were written"
    if case.random:
        close = torch.allclose(
            got.double(),
            want.double(),
            rtol=TOLERANCE[case.dtype],
            atol=TOLERANCE[case.dtype] * comm.world_size,
        )
        bits = torch.tensor([zlib.crc32(got.view(torch.uint8).numpy().tobytes())])
        shared = comm.all_gather(bits).flatten().tolist() if case.op == "all_reduce" else [0]
        return ("" if close else "not close to the sum in f64") or (
            "" if len(set(shared)) == 1 else "ranks hold different bits"
        )
    if torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
        return ""
    wrong = (got.view(torch.uint8) != want.view(torch.uint8)).nonzero().flatten()
    element = int(wrong[0]) // got.element_size()
    return f"element {element} of {got.numel()} is {got[element].item()}, expected {want[element].item()}"


def run_blocks(comm, check, blocks, first, stop_at):
    """From block `first` on. Returns (index of the block that broke the group or None, its error, index where
    time ran out or None).
    """
    for index in range(first, len(blocks)):
        title, block = blocks[index]
        failed, refused, done = 0, [], 0
        for number, case in enumerate(block):
            if number % 20 == 0 and not _time_left(comm, check, stop_at):
                return None, "", index
            try:
                problem, refusal = run_case(comm, check, case)
            except (
                Exception
            ) as error:  # the group is broken; the caller goes on with a new one after this block
                check.record(
                    f"{title}: {case}", False, f"rank {comm.rank}/{comm.world_size}: {describe(error)}"
                )
                return index, describe(error), None
            done += 1
            refused += [refusal] if refusal else []
            if refusal and case.algorithm is None:
                problem = f"refused: {refusal}"
            if problem:
                failed += 1
                if failed <= MAX_FAILURES:
                    check.record(f"{title}: {case}", False, f"rank {comm.rank}/{comm.world_size}: {problem}")
        if comm.rank == 0:
            told = f"{len(block) - len(refused)} cases" + (
                f"; {len(refused)} refused, e.g. {refused[0]}" if refused else ""
            )
            ok = None if len(refused) == len(block) else failed == 0
            check.record(
                f"{title}, {comm.world_size} ranks", ok, told, cases=len(block), refused=len(refused)
            )
    return None, "", None


def _time_left(comm, check, stop_at):
    """The same answer on all ranks: rank 0's clock counts."""
    word = torch.tensor([int(check.left() > stop_at)])
    return bool(comm.broadcast(word).item())


def matrix(check, world_sizes, mode, whole_for, algorithms=True, spare=5.0):
    """The check: all blocks for each world size; those in whole_for get the whole matrix. Stops `spare`
    seconds before the deadline.
    """
    for n in world_sizes if check.now == mode else ():
        blocks, first = cases.blocks(n, n in whole_for, algorithms), 0
        while first < len(blocks):
            results = check.run(
                n, run_blocks, blocks, first, spare, mode=mode, seconds=max(1.0, check.left())
            )
            stopped = [result[0] for result in results if isinstance(result, tuple) and result[0] is not None]
            broken = [describe(result) for result in results if not isinstance(result, tuple)]
            late = [result[2] for result in results if isinstance(result, tuple) and result[2] is not None]
            if broken:
                check.record(f"{n} {mode}", False, "; ".join(broken))
                return
            if late:
                check.not_reached(f"{n} {mode} from {blocks[late[0]][0]} on")
                return
            first = max(stopped) + 1 if stopped else len(blocks)
