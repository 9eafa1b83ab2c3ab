"""The benchmark of strategies: the command on a tiny model, what it counts as memory, its pairs, ranks that
fail. No figure is tested.
"""

import json
import time

import pytest
import torch
import torch.distributed as dist
from tiers import tier

from pycomm.benchmarks import __main__ as cli
from pycomm.benchmarks.common import turns
from pycomm.benchmarks.common.ranks import RankError
from pycomm.benchmarks.strategies import columns, command, measure, memory
from pycomm.benchmarks.strategies.model import Size, make_batch
from pycomm.benchmarks.strategies.torch_variants import STRATEGIES
from pycomm.benchmarks.strategies.variants import Spec
from pycomm.parallel import Plan
from pycomm.testing import run_ranks

TINY = "--dim 64 --layers 2 --vocab 64 --rows 4 --length 8 --microbatches 2 --rounds 2 --steps 1".split()
SIZE = Size(64, 2, 64, 4, 8, 2)


@tier(slow=1)
def test_command(tmp_path, capsys):
    files = {"json": tmp_path / "a.json", "markdown": tmp_path / "a.md", "plot": tmp_path / "a.png"}
    options = [f"--{kind}={path}" for kind, path in files.items()]
    plans = ["dp=2,zero=1", "pp=2,schedule=zb-h1"]
    assert (
        cli.main(
            ["strategies", *TINY, "--plans", ";".join(plans), "--torch", "ddp-zero1,fsdp2,pp-1f1b", *options]
        )
        == 0
    )
    found = json.loads(files["json"].read_text())
    rows = {row["name"]: row for row in found["rows"] if row["family"] != "deepspeed"}
    torch_names = [
        f"torch {name}, {backend}"
        for name in ("ddp-zero1", "fsdp2", "pp-1f1b")
        for backend in ("pycomm", "gloo")
    ]
    assert list(rows) == ["one process", *plans, *torch_names]
    expected = rows["one process"]["losses"]
    assert len(expected) == measure.WARM_UP + 2 and expected[-1] < expected[0]
    for row in rows.values():
        assert row["losses"] == pytest.approx(expected, rel=1e-5)
        assert (
            row["loss_error"] < 1e-5
            and row["step_ms"] > 0
            and row["cpu_ms"] > 0
            and len(row["rounds_ms"]) == 2
        )
        assert row["peak_bytes"] > row["held_bytes"] > found["parameter_bytes"]
    P = found["parameter_bytes"]
    held = {
        "one process": 4 * P,
        plans[0]: 3 * P,
        torch_names[0]: 3 * P,
        torch_names[2]: 2 * P,
        torch_names[3]: 2 * P,
    }
    for (
        name,
        nbytes,
    ) in (
        held.items()
    ):  # values, gradients and AdamW's two moments, of which ZeRO-1 halves the last two, FSDP2 all
        assert rows[name]["held_bytes"] == pytest.approx(nbytes, rel=0.02), name
    assert rows[plans[1]]["held_bytes"] < 2.2 * P
    assert {(pair["plan"], pair["torch"]) for pair in found["pairs"]} == {
        *((plans[0], f"torch ddp-zero1, {backend}") for backend in ("pycomm", "gloo")),
        *((plans[1], f"torch pp-1f1b, {backend}") for backend in ("pycomm", "gloo")),
    }
    text = files["markdown"].read_text()
    assert all(f"| {name} |" in text for name in rows) and "Losses" in text
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert "one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--plans", "dp=4"], "is for 4 ranks"),
        (["--plans", "dq=2"], "there is no 'dq'"),
        (["--torch", "horovod"], "must be of ddp"),
        (["--rows", "3"], "multiple of --ranks"),
        (["--dim", "48"], "multiple of 32"),
        (["--rounds", "0"], "1 or more"),
    ],
)
def test_wrong_options(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2 and reason in capsys.readouterr().err


def test_every_torch_strategy_has_a_plan():
    plans = [Plan(dp=2, zero=stage) for stage in range(4)] + [
        Plan(tp=2),
        Plan(pp=2, schedule="gpipe"),
        Plan(pp=2),
    ]
    assert {columns.counterpart(plan) for plan in plans} == set(STRATEGIES)
    assert [columns.counterpart(plan) for plan in (Plan(ring=2), Plan(pp=2, zero=1), Plan(dp=2, tp=2))] == [
        None
    ] * 3


def test_batches_differ_and_repeat():
    first, again, other = make_batch(SIZE, 0), make_batch(SIZE, 0), make_batch(SIZE, 1)
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_wrong_losses_fail_the_command(monkeypatch, capsys):
    right = [4.0, 3.0]
    for wrong, status in (([4.0, 3.0 + 1e-6], 0), ([4.0, 3.01], 1), ([4.0, float("nan")], 1)):
        timed = measure.Timed([[0.1], [0.2]], 0.1, wrong)
        row = columns.Result(
            Spec("x", "pycomm.parallel", "dp=2", "pycomm"), timed, None, columns.loss_error(wrong, right)
        )
        monkeypatch.setattr(command, "run", lambda options, specs, row=row: columns.Results([row], 4, []))
        assert command.main([]) == status
        assert ("losses differ" in capsys.readouterr().err) == bool(status)


def test_ratio_is_by_round():
    fast, slow = measure.Timed([[1.0], [10.0], [1.0]], 0, []), measure.Timed([[2.0], [20.0], [2.0]], 0, [])
    assert turns.times_faster(fast.rounds, slow.rounds) == (2.0, 2.0, 2.0) and fast.seconds == 1.0


def test_live_bytes():
    with memory.LiveBytes() as live:
        a = torch.zeros(1000)
        view = a[:10]
        del a
        assert live.now() == 4000  # a view holds all of its storage
        weight = torch.nn.Parameter(torch.zeros(100, 10))
        y = (torch.ones(5, 100) @ weight).exp()
        assert live.now() == 4000 + 4000 + (500 + 50) * 4  # of the input and the output: saved for backward
        y.sum().backward()
        del y
        assert live.now() == 3 * 4000
        live.reset()
        (view + 1).sum()
        assert live.peak == 3 * 4000 + 40 + 4 and live.now() == 3 * 4000
        view.untyped_storage().resize_(0)
        assert live.now() == 2 * 4000


def run(world_size, body, timeout=300.0):
    return measure.run(world_size, body, backend="pycomm", timeout=timeout)


def resident_peaks(_):
    memory.steady_heap()
    sizes = []
    for count in (0, 8 << 20, 0):
        memory.reset_resident_peak()
        del [torch.ones(count)][:]
        sizes.append(memory.resident_peak())
    return sizes


@tier(slow=1)
def test_resident_peak_is_reset():
    """In a new interpreter: a forked one has holes in its heap, which are resident and may take the block."""
    before, with_block, after = run_ranks(1, resident_peaks, mode="spawn")[0]
    assert with_block - before == pytest.approx(32 << 20, rel=0.05) and abs(after - before) < 2 << 20


@tier(slow=1)
def test_ranks_that_fail_are_named():
    """Long before those that sleep would end."""

    def fail(_):
        if dist.get_rank() == 1:
            raise ValueError("bad luck")
        time.sleep(120)

    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1.*bad luck"):
        run(3, fail)
    with pytest.raises(RankError, match="rank 0 did not end in time"):
        run(2, lambda _: dist.get_rank() or time.sleep(120), timeout=1.5)
    assert time.monotonic() - start < 30
