"""`python -m pycomm.plan calibrate`: measures this machine in about a minute and writes its TOML file.

All ranks of a node compute at once, so that what they share (memory, caches, clocks) is shared here too:

    products       square ones of several sizes: the best rate is the peak, `product_half` the size that
                   fits best to the others by e(n) = 1 / (1 + 3 half / n)
    attention      a fused causal one, forward and backward, over what its products say
    memory_gb_s    a sum of two large tensors: 3 x bytes. `memory`: what is no product in a block (norm, gelu,
                   sum), forward and backward, by the bytes that traced.py counts for it
    launch         an addition of one element
    collectives    all_reduce of 8 bytes and of 16 MB by pycomm: latency a and bandwidth w from
                   2 a and 2 a + 2 (n-1)/n B / w. `one_way`: the share of w that an all_gather, a
                   reduce_scatter and an all_to_all of 16 MB reach, where a rank copies its own part too
    overlap        what of an all_reduce is hidden by products that take as long

The median of several turns and over the ranks, as steps are told by their median: what others do on the
machine meanwhile shows in both.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist

from pycomm.groups import all_gather_flat, reduce_scatter_flat
from pycomm.parallel.planning.asked import whole
from pycomm.parallel.planning.compute import BACKWARD, Cut, block_time
from pycomm.parallel.planning.machine import Machine, from_toml, tomllib
from pycomm.parallel.planning.model import Model
from pycomm.parallel.planning.quantities import ByteRate, FlopRate, Seconds
from pycomm.testing import run_ranks

__all__ = ["calibrate", "main", "measure"]

SIZES = (32, 64, 128, 256, 512, 1024)
LARGE = 16 << 20  # bytes
TURNS = 5
MOST = 1024  # ranks of a node
ATTENTION = 8, 8, 256, 32  # rows, heads, positions, width of a head
ELEMENTS = 1024, 512  # tokens, width of the hidden state


class Where(TypedDict, total=False):
    device: str
    dtype: torch.dtype


class Measured(NamedTuple):
    """Of one rank, or the medians over the ranks. products: the rate by size; memory: of a sum of two
    tensors, elements: of what is no product in a block; launch: of one kernel; small, large: an all_reduce of
    a few bytes, and of LARGE ones; one_way: a collective of one direction; overlap: the share that is hidden.
    """

    products: dict[int, FlopRate]
    memory: ByteRate
    elements: ByteRate
    attention: Seconds
    launch: Seconds
    small: Seconds = Seconds(1e-6)
    large: Seconds = Seconds(2e-6)
    one_way: Seconds = Seconds(1e-6)
    overlap: float = 1.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.plan calibrate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--ranks", type=int, default=max(len(os.sched_getaffinity(0)), 2), help="of this node"
    )
    parser.add_argument("--out", default="machine.toml")
    given = parser.parse_args(arguments)
    try:
        whole("--ranks", given.ranks, MOST)
        with open(given.out, "a"):  # before a minute of measuring, not after it
            pass
        text = calibrate(given.ranks)
        with open(given.out, "w") as file:
            file.write(text)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{text}\nwritten: {given.out}; use it with --machine {given.out}")
    return 0


def calibrate(ranks: int) -> str:
    """The TOML text of this machine, for so many ranks on it."""
    found = run_ranks(ranks, measure, mode="processes", backend="pycomm", timeout=300.0)
    medians = found[0]._replace(
        **{name: statistics.median(getattr(each, name) for each in found) for name in Measured._fields[1:]},
        products={size: FlopRate(statistics.median(each.products[size] for each in found)) for size in SIZES},
    )
    expected = _expected_attention(from_toml(tomllib.loads(_toml(medians, ranks, 1.0))))
    return _toml(medians, ranks, min(expected / medians.attention, 1.0))


def _expected_attention(machine: Machine) -> Seconds:
    """Of the attention that was measured, as its products say."""
    rows, heads, length, width = ATTENTION
    block = Model("", 1, heads * width, heads, heads, width, 1, length, (), 0, 0, 0, item=_item())
    time = block_time(machine, block, Cut(rows))
    return Seconds(time.forward + time.input)


def _toml(measured: Measured, ranks: int, attention: float) -> str:
    """attention: the share of its products' rate that it reaches."""
    latency = measured.small / 2
    seconds = max(measured.large - measured.small, 1e-9)
    peak = max(measured.products.values())
    bandwidth = 2 * (ranks - 1) / ranks * LARGE / seconds if ranks > 1 else 1e12
    one_way = ranks > 1 and min(
        (ranks - 1) / ranks * LARGE / bandwidth / max(measured.one_way - latency, 1e-9), 1.0
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    return f"""name = "{device}, {ranks} ranks"  # measured by python -m pycomm.plan calibrate

[device]
peak_tflops = {peak / 1e12:.4g}  # best of products of {SIZES[0]} to {SIZES[-1]}
memory_gib = {memory / 2**30:.4g}
reserved_gib = 0
memory_gb_s = {measured.memory / 1e9:.4g}  # a + b of {LARGE} bytes each
host_gb_s = {measured.memory / 1e9:.4g}

[reached]
product = 1
product_half = {_fitted(measured.products, peak):.4g}
memory = {min(measured.elements / measured.memory, 1.0):.3g}
attention = {attention:.3g}
launch_us = {measured.launch * 1e6:.4g}
overlap = {measured.overlap:.2g}

[[link]]
name = "pycomm, one node"
ranks = 0
gb_s = {bandwidth / 1e9:.4g}
latency_us = {latency * 1e6:.4g}
one_way = {one_way or 1:.3g}
"""


def _fitted(products: Mapping[int, FlopRate], peak: FlopRate) -> float:
    """The half size with the least squares of relative error."""

    def error(half: float) -> float:
        return sum((peak / (1 + 3 * half / n) / rate - 1) ** 2 for n, rate in products.items())

    return min((2 ** (i / 4) for i in range(40)), key=error)


def measure(rank: int) -> Measured:
    """Of this rank, while the others measure the same."""
    torch.set_num_threads(1)
    where: Where = {"device": "cuda", "dtype": torch.bfloat16} if torch.cuda.is_available() else {}
    products: dict[int, FlopRate] = {}
    for size in SIZES:
        a, b = torch.randn(size, size, **where), torch.randn(size, size, **where)
        products[size] = FlopRate(2 * size**3 / _seconds(functools.partial(torch.matmul, a, b)))
    x, y = (torch.ones(LARGE // 4, device=a.device) for _ in range(2))
    z, one = torch.empty_like(x), torch.ones(1, device=x.device)
    found = Measured(
        products,
        memory=ByteRate(3 * LARGE / _seconds(lambda: torch.add(x, y, out=z))),
        elements=_elements(where),
        attention=_attention(where),
        launch=_seconds(lambda: one.add_(1)),
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        return found._replace(
            small=_seconds(lambda: dist.all_reduce(one)),
            large=_seconds(lambda: dist.all_reduce(z)),
            one_way=_one_way(z),
            overlap=_overlap(z, a, b),  # the largest matrices
        )
    return found


def _one_way(z: torch.Tensor) -> Seconds:
    """An all_gather, a reduce_scatter and an all_to_all of the buffer z: their mean."""
    n = dist.get_world_size()
    whole = z[: z.numel() // n * n]
    part, other = whole[: whole.numel() // n].clone(), torch.empty_like(whole)
    times = (
        _seconds(lambda: all_gather_flat(other, part)),
        _seconds(lambda: reduce_scatter_flat(part, whole)),
        _seconds(lambda: dist.all_to_all_single(other, whole)),
    )
    return Seconds(statistics.mean(times))


def _elements(where: Where) -> ByteRate:
    """Of what is no product in a block: forward, and backward, which counts BACKWARD times."""
    tokens, hidden = ELEMENTS
    x = torch.randn(tokens, hidden, requires_grad=True, **where)
    inner = torch.randn(tokens, 4 * hidden, requires_grad=True, **where)
    norm = torch.nn.LayerNorm(hidden, **where)

    def run() -> None:
        torch.autograd.backward([x + norm(x), torch.nn.functional.gelu(inner)], [x.detach(), inner.detach()])
        x.grad = inner.grad = None

    # As traced.py: of the hidden state 8 per block, which has two norms and sums; twice what enters and
    # leaves a gelu.
    counted = _item() * tokens * (4 * hidden + 2 * 8 * hidden)
    return ByteRate((1 + BACKWARD) * counted / _seconds(run))


def _attention(where: Where) -> Seconds:
    """A fused causal attention, forward and backward."""
    rows, heads, length, width = ATTENTION
    q, k, v = (torch.randn(rows, heads, length, width, requires_grad=True, **where) for _ in range(3))

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(out.detach())

    return _seconds(run)


def _item() -> int:
    return 2 if torch.cuda.is_available() else 4


def _overlap(z: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """What of an all_reduce is hidden by products of about its time: the median of turns, in each of which
    the two run one after the other and beside each other.
    """

    def compute() -> None:
        for _ in range(int(count)):
            a @ b

    def both() -> None:
        moved = dist.all_reduce(z, async_op=True)
        compute()
        moved.wait()

    count = torch.tensor([max(1, round(_seconds(lambda: dist.all_reduce(z)) / _seconds(lambda: a @ b)))])
    dist.broadcast(count, 0)
    turns = []
    for _ in range(3 * TURNS):
        moving = _once(lambda: dist.all_reduce(z))
        computing = _once(compute)
        turns.append((moving + computing - _once(both)) / min(moving, computing))
    return min(max(statistics.median(turns), 0.0), 1.0)


def _once(call: Callable[[], object]) -> Seconds:
    dist.barrier()
    start = time.perf_counter()
    call()
    _wait()
    return Seconds(time.perf_counter() - start)


def _seconds(call: Callable[[], object], least: float = 0.02) -> Seconds:
    """Median of TURNS of about `least` seconds; as many calls on every rank."""
    call()
    start = time.perf_counter()
    call()
    _wait()
    count = torch.tensor([max(1, min(1000, int(least / max(time.perf_counter() - start, 1e-7))))])
    if dist.is_initialized():
        dist.broadcast(count, 0)
    turns = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for _ in range(int(count)):
            call()
        _wait()
        turns.append((time.perf_counter() - start) / int(count))
    return Seconds(statistics.median(turns))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
