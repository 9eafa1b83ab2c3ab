"""What form.py, dispatch.py, context.py and launch.py do for CUDA tensors before anything runs, with the GPU
played by others.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from oracle import draw

from pycomm.fused import choice, context, dispatch, form, launch, machine, ranks, tuner
from pycomm.fused.config import Config
from pycomm.fused.problem import Problem
from pycomm.groups import Group

HERE = machine.Machine(90, 1, 132, "")
PLAIN = choice.Choice("plain", 1, None, "a test")


def on_gpu(index):
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))


def test_a_call_runs_on_the_device_of_its_tensors(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def current(device):
        entered.append(device)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(dispatch, "_choose", lambda *args: entered.append("chosen"))
    monkeypatch.setattr(form, "run", lambda *args, **options: entered.append("run"))
    dispatch.forward(SimpleNamespace(op="matmul"), on_gpu(3), None, None, ranks.ALONE)
    assert entered == [torch.device("cuda", 3), "chosen", "run", "left"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_an_empty_shard_measures_with_the_others(rank, monkeypatch):
    monkeypatch.setenv("PYCOMM_FUSED", "auto")
    monkeypatch.setattr(machine, "of", lambda *args: HERE)
    monkeypatch.setattr(form, "has_triton", lambda: True)
    monkeypatch.setattr(tuner, "decide", lambda problem, *rest: PLAIN)
    shards = (4096, 0)
    problem = Problem("matmul_all_reduce", 4096, 4096, shards[rank], torch.bfloat16, 2, rank, shards=shards)
    group = ranks.Ranks(Group("two", 2, rank, None), object(), ranks.Cache())
    assert dispatch._choose(problem, on_gpu(rank), None, None, group) is PLAIN


@pytest.mark.parametrize("forced", ["auto", "fused"])
@pytest.mark.parametrize("op", ["matmul", "all_gather_matmul"])
def test_a_rank_loads_no_kernel_alone_among_threads(op, forced, monkeypatch):
    """A peer's kernel that waits for this rank would not end, and no exchange says that there is none."""
    monkeypatch.setenv("PYCOMM_FUSED", forced)
    monkeypatch.setattr(machine, "of", lambda *args: HERE)
    monkeypatch.setattr(form, "has_triton", lambda: True)
    monkeypatch.setattr(tuner, "decide", lambda problem, ranks, device, here, fallback, run: fallback)
    problem = Problem(op, 8192, 8192, 8192, torch.bfloat16, 1, 0, "gelu", True)
    alone = ranks.Ranks(Group("one", 1, 0, None), object(), ranks.Cache())
    for threads, name in ((set(), "fused"), ({0}, "fused"), ({0, 3}, "plain")):
        monkeypatch.setattr(dispatch._C, "ranks_are_threads", threads.__contains__)
        chosen = dispatch._choose(problem, on_gpu(3), None, None, alone)
        assert chosen.name == name and ("threads of this process" in chosen.reason) == (name == "plain")


def test_what_was_measured_is_for_one_device(tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOMM_CACHE", str(tmp_path))
    monkeypatch.setattr(
        tuner, "measure", lambda problem, ranks, device, *rest: choice.Choice("plain", 1, None, str(device))
    )
    monkeypatch.setattr(tuner, "lookup", lambda *args: None)
    alone, problem = (
        ranks.ALONE._replace(cache=ranks.Cache()),
        Problem("matmul", 8, 8, 8, torch.float32, 1, 0),
    )
    for device in ("cpu", "meta", "cpu"):
        assert tuner.decide(problem, alone, torch.device(device), HERE, PLAIN, None).reason == device


def test_a_first_call_cannot_be_captured(monkeypatch):
    """Where the pieces begin would be copied to the device: in a capture, an error of CUDA that names
    nothing.
    """
    communicator = SimpleNamespace(rank=0, world_size=2, timeout=1.0)
    shared = context.Context(communicator, "cpu", HERE)
    problem = Problem("all_gather_matmul", 5, 8, 8, torch.float32, 2, 0, sizes=(3, 2))
    known = shared.spans_of(problem)
    monkeypatch.setattr(context.Context, "capturing", lambda self: True)
    assert shared.spans_of(problem) is known and known.tolist() == [0, 3, 5]
    with pytest.raises(
        ValueError,
        match=r"\[rank 0/2\] all_gather_matmul #0: the first call with sizes=\[2, 3\] cannot be captured",
    ):
        shared.spans_of(problem._replace(sizes=(2, 3)))


def test_a_default_device_is_not_for_the_record():
    with torch.device("meta"):
        shared = context.Context(SimpleNamespace(rank=0, world_size=2, timeout=1.0), "cpu", HERE)
    shared.check("matmul_all_reduce")


@pytest.mark.parametrize(
    ("x", "mode"),
    [
        (draw(0, 32, 64), launch.DESCRIPTOR),
        (draw(0, 32, 64).t(), launch.TRANSPOSED),
        (draw(0, 1, 64), launch.DESCRIPTOR),
        (draw(0, 32, 66), launch.DESCRIPTOR),  # rows begin at multiples of 16 bytes, not of 32
        (draw(0, 32, 68, dtype=torch.float32), launch.DESCRIPTOR),
        (draw(0, 68, 32, dtype=torch.float32)[:, :-2], launch.DESCRIPTOR),
        (draw(0, 32, 66, dtype=torch.float32), launch.POINTERS),
        (draw(0, 32, 72, dtype=torch.bfloat16).t(), launch.TRANSPOSED),
        (draw(0, 32, 68, dtype=torch.bfloat16).t(), launch.POINTERS),
        (draw(0, 64).expand(32, 64), launch.POINTERS),
        (draw(0, 64).expand(32, 64).t(), launch.POINTERS),
        (draw(0, 640).as_strided((32, 64), (16, 1)), launch.POINTERS),
        (draw(0, 32, 65)[:, 1:], launch.POINTERS),
        (draw(0, 32, 64)[:, 1:], launch.POINTERS),
        (draw(0, 0, 64), launch.POINTERS),
        (torch.zeros(32, 1).expand(32, 64), launch.POINTERS),
    ],
)
def test_which_operands_the_memory_accelerator_takes(x, mode):
    assert launch._operand(x, 16, 16, True)[0] == mode
    assert launch._operand(x, 16, 16, False)[0] == launch.POINTERS


@pytest.mark.parametrize(("setting", "precision"), [("tf32", "tf32"), ("ieee", "ieee")])
def test_tf32_as_torch_says(setting, precision, monkeypatch):
    """Set by torch's new name, the old one cannot be read."""
    monkeypatch.setattr(launch, "_options", lambda *args: {})
    problem = Problem("matmul", 8, 8, 8, torch.float32, 1, 0)
    kept = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        found = launch._compiled_for(problem, Config(16, 16, 16), None, False, None, a_mode=0, b_mode=0)
        assert found["TILE"].precision == precision
    finally:
        torch.backends.cuda.matmul.fp32_precision = kept
