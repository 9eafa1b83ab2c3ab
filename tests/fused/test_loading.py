"""When kernels are loaded (pycomm/fused/loading.py), with a driver that waits, before it loads one, for those
that run, as CUDA's may; a kernel runs until all ranks have launched it.
"""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from pycomm.fused import loading
from pycomm.fused.context import Context
from pycomm.testing import run_ranks

PATIENCE = 5.0  # seconds; a rank that waits longer would wait for ever


class Driver:
    """Of all ranks. exclusive: nothing is launched while it loads."""

    def __init__(self, ranks, exclusive=True):
        self.ranks, self.exclusive, self.changed = ranks, exclusive, threading.Condition()
        self.launched = [0] * ranks  # kernels, by rank
        self.loaded, self.loading, self.events = set(), 0, []

    def load(self, rank, name):
        with self.changed:
            if name in self.loaded:
                return
            assert not self.loading, "one thread at a time"
            self.loading += 1
            quiet = self.changed.wait_for(lambda: len({*self.launched}) == 1, PATIENCE)
            self.loading -= 1
            self.changed.notify_all()
            assert quiet, f"rank {rank} loads {name} while a kernel waits: {self.launched}"
            self.loaded.add(name)
            self.events.append(f"load {name}")

    def launch(self, rank, name):
        self.load(rank, name)
        with self.changed:
            assert self.changed.wait_for(lambda: not (self.exclusive and self.loading), 3 * PATIENCE)
            self.launched[rank] += 1
            self.events.append(f"launch {name}")
            self.changed.notify_all()


class Kernel:
    """What a rank has of one; Triton makes another for operands that lie otherwise."""

    def __init__(self, driver, rank, name):
        self.driver, self.rank, self.name = driver, rank, name

    def variant(self, x):
        columns = x.dim() == 2 and x.stride(0) < x.stride(1)
        dense = x.is_contiguous() or x.t().is_contiguous()
        return f"{self.name} {'columns' if columns else 'rows'}{'' if dense else ' apart'}"

    def warmup(self, x, grid):
        self.driver.load(self.rank, self.variant(x))
        return SimpleNamespace(name=self.name, asm={"ptx": ""}, run=None)

    def __getitem__(self, grid):
        return lambda x: self.driver.launch(self.rank, self.variant(x))


def run(ranks, body):
    driver = Driver(ranks)

    def rank(comm):
        context = SimpleNamespace(started={}, communicator=comm._comm, place=contextlib.nullcontext)

        def start(use, x, name="kernel"):
            kernel = Kernel(driver, comm.rank, name)
            loading.start(context, use, kernel, 1, (x, None), lambda x, bias: ((x,), {}))

        body(comm, start)

    run_ranks(ranks, rank, timeout=60)
    return driver.events


X = torch.zeros(32, 64)


def test_all_load_before_any_rank_is_in_a_kernel():
    def body(comm, start):
        for use in ("first", "first", "second"):
            start(use, X, use)

    events = run(3, body)
    assert [event for event in events if "load" in event] == ["load first rows", "load second rows"]
    assert events[0] == "load first rows"


def test_a_rank_that_loads_while_a_peer_has_not_launched_yet():
    """Rank 1's kernel waits for that of rank 2, which is late; rank 0 comes to one that is not loaded."""

    def body(comm, start):
        start("first", X, "first")
        if comm.rank == 2:
            time.sleep(0.3)
        start("first", X, "first")
        start("second", X, "second")

    assert run(3, body).count("launch second rows") == 3


@pytest.mark.parametrize(
    "first, then",
    [
        (X, X.t().clone().t()),
        (X.t().contiguous().t(), X),
        (X, torch.zeros(32, 81)[:, :64]),
        (torch.zeros(32, 81)[:, :64], X.t().contiguous().t()),
        (torch.zeros(32, 81)[:, :64], X),
    ],
)
def test_operands_that_lie_otherwise_on_one_rank_alone(first, then):
    """Its peer is in the kernel already."""

    def body(comm, start):
        start("use", first)
        if comm.rank == 0:
            time.sleep(0.2)
            start("use", then)
        else:
            start("use", first)

    events = run(2, body)
    assert len([event for event in events if "launch" in event]) == 4


def test_a_launch_never_waits_for_one_that_loads():
    """Two groups: a kernel of the second waits for its rank 1, while rank 0 of the first loads."""
    driver, held = Driver(2, exclusive=False), threading.Event()

    def load(*arguments, grid):
        held.set()
        driver.load(0, "other rows")
        return SimpleNamespace(name="other", asm={"ptx": ""}, run=None)

    driver.loaded.add("kernel rows")
    driver.launched[:] = [1, 0]
    alone = SimpleNamespace(world_size=1)
    arguments = lambda x, bias: ((x,), {})  # noqa: E731
    known = loading.Loaded(frozenset({(loading._layout(X), None)}), (False, False))
    loader = SimpleNamespace(warmup=load)
    failed = []

    def first():
        with contextlib.suppress(TypeError):  # what is loaded is not launched here
            try:
                context = SimpleNamespace(started={}, communicator=alone, place=contextlib.nullcontext)
                loading.start(context, "other", loader, 1, (X, None), arguments)
            except AssertionError as error:
                failed.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(PATIENCE)
    context = SimpleNamespace(started={"use": known}, communicator=alone, place=contextlib.nullcontext)
    kernel = Kernel(driver, 1, "kernel")
    loading.start(context, "use", kernel, 1, (X, None), arguments)
    thread.join(2 * PATIENCE)
    assert not thread.is_alive() and not failed


class Line:
    """Of a group's collectives, as enter_line and leave_line of _C.Communicator know it."""

    world_size = 1

    def __init__(self, fails=False):
        self.events, self.fails = [], fails

    def enter_line(self, device):
        self.events.append(f"enter {device}")

    def leave_line(self, device):
        self.events.append(f"leave {device}")

    def __getitem__(self, grid):  # the kernel
        def launch(x):
            self.events.append("launch")
            if self.fails:
                raise RuntimeError("no launch")

        return launch


@pytest.mark.parametrize("shares, fails", [(True, False), (True, True), (False, False)])
def test_ranks_that_share_a_device_launch_in_the_line_of_their_group(shares, fails):
    """[Note: places] in context.py. What it does there: test_cuda_python.py, group_budget_test.cc."""
    line = Line(fails)
    known = loading.Loaded(frozenset({(loading._layout(X), None)}), (False, False))
    context = SimpleNamespace(
        started={"use": known}, communicator=line, device="cuda:0", shares_device=shares
    )
    context.place = lambda: Context.place(context)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        loading.start(context, "use", line, 1, (X, None), lambda x, bias: ((x,), {}))
    assert line.events == (["enter cuda:0", "launch", "leave cuda:0"] if shares else ["launch"])


@pytest.mark.parametrize("x", [X[:, 1:], torch.zeros(2049)[1:].view(32, 64), X[:1].expand(32, 64), X[:, ::2]])
@pytest.mark.parametrize("by_columns", [False, True])
def test_dense(x, by_columns):
    x = x.clone(memory_format=torch.preserve_format) if x.is_contiguous() else x
    (made, none) = loading._dense((x, None), (by_columns, False))
    assert none is None and torch.equal(made, x) and made.data_ptr() % 16 == 0
    assert made.stride() == ((1, x.shape[0]) if by_columns else (x.shape[1], 1))
    assert loading._dense((made, None), (by_columns, False))[0].data_ptr() == made.data_ptr()
