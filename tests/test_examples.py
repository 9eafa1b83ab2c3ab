"""Runs every example as a user would, with tiny settings, and checks what it prints and writes."""

import argparse
import ast
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiers import tier

from pycomm.benchmarks import bandwidth_demo
from pycomm.testing import run_ranks

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TINY = ["--layers=1", "--width=32", "--heads=2", "--block=32", "--batch=4", "--text-bytes=200000"]
TINY_TRAINING = [*TINY, "--steps=12", "--val-every=6", "--val-windows=8"]
SECONDS = 90


def run_python(*args, cwd):
    """Runs the interpreter with these arguments and returns what it printed; fails with all of it
    otherwise.
    """
    done = subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, timeout=SECONDS, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{args} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def is_png(path):
    return path.stat().st_size > 10_000 and path.read_bytes().startswith(b"\x89PNG\r\n")


@tier(quick=1 / 2)
@pytest.mark.parametrize("launcher, ranks", [([], 4), (TORCHRUN, 2)], ids=["alone", "torchrun"])
def test_all_reduce(launcher, ranks, tmp_path):
    printed = run_python(*launcher, EXAMPLES / "01_all_reduce.py", cwd=tmp_path)
    sums = [ranks * i + 10 * sum(range(ranks)) for i in range(4)]
    expected = {f"rank {rank} of {ranks}: [{' '.join(f'{x}.' for x in sums)}]" for rank in range(ranks)}
    assert set(printed.splitlines()) == expected


def load(name: str) -> ModuleType:
    """An example as a module: the name of its file need not be one of Python's."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(backend, folder, launcher=()):
    """Runs the training example; returns its figures and what it printed."""
    folder.mkdir()
    flags = [*TINY_TRAINING, f"--backend={backend}", "--json=figures.json"]
    printed = run_python(*launcher, EXAMPLES / "02_train_gpt_ddp.py", *flags, cwd=folder)
    return json.loads((folder / "figures.json").read_text()), printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(figures, what was printed, folder) of one training on pycomm."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return *train("pycomm", folder), folder


@tier(slow=1)
def test_train(trained):
    figures, printed, folder = trained
    assert figures["ranks"] == 2 and figures["tokens"] == 12 * 2 * 4 * 32
    assert len(figures["train_loss"]) == 12 and list(figures["validation_loss"]) == ["0", "6", "12"]
    assert all(map(math.isfinite, figures["train_loss"]))
    assert figures["train_loss_first"] == pytest.approx(
        math.log(256), abs=1e-3
    )  # the head's weights start as zeros
    assert figures["validation_loss_last"] < figures["validation_loss_first"] - 0.05
    assert figures["tokens_per_s"] > 0 and 0 <= figures["communication_share"] < 1
    assert f"-> {figures['validation_loss_last']:.4f}" in printed and "2 ranks over pycomm" in printed
    assert is_png(folder / "demo" / "loss.png")


@tier(deep=1)
def test_train_gives_the_same_losses_again_and_over_gloo(trained, tmp_path):
    """With two ranks a sum has one order only, so that backends may not differ by a single bit."""
    first, *_ = trained
    again, _ = train("pycomm", tmp_path / "again", TORCHRUN)
    gloo, _ = train("gloo", tmp_path / "gloo")
    assert first["train_loss"] == again["train_loss"] == gloo["train_loss"]
    assert first["validation_loss"] == again["validation_loss"] == gloo["validation_loss"]


def train_on_a_slow_machine(rank: int, slow: int, seconds: float) -> tuple[list[int], dict[str, Any]]:
    """Trains with a limit of a minute. On the clock of the rank `slow` a step takes so many seconds. Returns
    the steps that were shown, and the figures.
    """
    example, shown = load("02_train_gpt_ddp.py"), []
    begin, calls = time.monotonic(), itertools.count()

    def clock() -> float:
        return begin + seconds * len(shown) + 1e-6 * next(calls)

    if rank == slow:
        example.time = SimpleNamespace(perf_counter=clock, monotonic=clock)
    parser = argparse.ArgumentParser()
    example.add_model_flags(parser)
    example.add_training_flags(parser)
    args = parser.parse_args([*TINY_TRAINING, "--limit=60"])
    figures = example.train(args, lambda step, text: shown.append(step))
    example.let_go_of_collectives()
    return shown, figures


@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_ranks_stop_at_the_step_in_which_the_time_of_one_is_up(slow):
    """The fifth step ends at 64 s on the clock of the slow rank."""
    results = run_ranks(2, train_on_a_slow_machine, slow, 16.0, backend="pycomm", mode="processes")
    for shown, figures in results:
        assert shown == [1, 2, 3, 4, 5] and figures["steps"] == 5 and figures["of_steps"] == 12
        assert len(figures["train_loss"]) == 5 and list(figures["validation_loss"]) == [0, 5]
    assert results[0][1]["train_loss"] == results[1][1]["train_loss"]


@tier(slow=1)
def test_a_limit_ends_the_training_and_is_told(trained, tmp_path):
    """The losses up to there are those of a training without a limit."""
    flags = [*TINY_TRAINING, "--limit=1e-6", "--json=figures.json"]
    printed = run_python(EXAMPLES / "02_train_gpt_ddp.py", *flags, cwd=tmp_path)
    figures, (whole, *_) = json.loads((tmp_path / "figures.json").read_text()), trained
    told = f"stopped after {figures['total_s']:.0f} s at step 1 of 12: this machine is busy or slow"
    assert told in printed.splitlines() and "stopped" not in trained[1]
    assert figures["train_loss"] == whole["train_loss"][:1] and figures["tokens"] == 2 * 4 * 32
    assert list(figures["validation_loss"]) == ["0", "1"] and math.isfinite(figures["validation_loss_last"])
    assert is_png(tmp_path / "demo" / "loss.png")


@tier(slow=1)
def test_bandwidth_demo(tmp_path, capsys):
    """With so little time the smallest size is measured in one round, and the rest is named."""
    results = bandwidth_demo(str(tmp_path / "out.png"), limit=1e-6)
    printed = capsys.readouterr().out
    assert [(row.backend, row.nbytes, row.wrong) for row in results.rows] == [
        ("pycomm-torch", 8, 0),
        ("gloo", 8, 0),
    ]
    assert "all_reduce 8 f32 in 1 of 3 rounds; not at all: all_reduce 512 f32, all_reduce 4K f32" in printed
    assert "n/a" not in printed and "in place" in printed and is_png(tmp_path / "out.png")


@tier(deep=1)
def test_compare_ddp_step(tmp_path):
    flags = [*TINY, "--rounds=2", "--steps-per-turn=2", "--json=figures.json"]
    printed = run_python(EXAMPLES / "03_compare_ddp_step.py", *flags, cwd=tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures["backends"]) == ["pycomm", "gloo"] and figures["compute_ms"] > 0
    assert figures["backends"]["pycomm"]["loss"] == figures["backends"]["gloo"]["loss"]
    assert "pycomm over gloo: " in printed


@tier(slow=1)
def test_demo(tmp_path, monkeypatch, capsys):
    """Its bandwidth table is measured for real by `make demo`, and tested with the benchmarks."""
    demo = load("demo.py")
    rows = [
        SimpleNamespace(backend=name, nbytes=8, best_us=us)
        for name, us in (("pycomm-torch", 5.0), ("gloo", 100.0))
    ]
    monkeypatch.setattr(demo, "bandwidth_demo", lambda out_png, ranks, limit: SimpleNamespace(rows=rows))
    monkeypatch.chdir(tmp_path)
    demo.main(["--out=out", *TINY_TRAINING])
    printed = capsys.readouterr().out
    assert "= 20.0x" in printed and "12 of 12 steps" in printed and "nats per byte" in printed
    assert is_png(tmp_path / "out" / "loss.png")
    first, *_, pictures, trying, command_1, command_2, command_3 = printed.splitlines()
    assert "all_reduce of pycomm beside Gloo" in first and "a small GPT trained on 2 ranks" in first
    assert "one to three minutes" in first
    assert pictures == "Pictures: out/bandwidth.png and out/loss.png" and "Three commands" in trying
    assert [line.split("  #")[0].strip() for line in (command_1, command_2, command_3)] == [*demo.commands()]


def test_last_lines_of_the_demo(monkeypatch):
    """They are as one types them in the folder of the checkout, and fit into 80 columns there."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    pictures, trying, *commands = load("demo.py").last_lines(Path("demo"))
    assert pictures == "Pictures: demo/bandwidth.png and demo/loss.png" and "Three commands" in trying
    assert len(commands) == 3 and max(map(len, commands)) <= 80
    for line in commands:
        python, first, *_ = line.split()
        assert python == ".venv/bin/python" and (first == "-m" or (ROOT / first).is_file())


@tier(slow=1)
@pytest.mark.parametrize("number", range(3))
def test_what_the_demo_says_to_try_next_works(number, monkeypatch):
    """As it is printed, in the folder of the checkout."""
    monkeypatch.chdir(ROOT)
    command = [*load("demo.py").commands()][number]
    done = subprocess.run(command, shell=True, cwd=ROOT, timeout=SECONDS, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, f"{command}\n{done.stdout}\n{done.stderr}"


@tier(slow=1)
@pytest.mark.parametrize("launcher, form", [([], "auto"), (TORCHRUN, "chunked")], ids=["alone", "torchrun"])
def test_fused_matmul(launcher, form, tmp_path, monkeypatch):
    """Every rank compares itself with one process, in the example. PYCOMM_FUSED must show in what explain
    says, on either device.
    """
    monkeypatch.setenv("PYCOMM_FUSED", form)
    printed = run_python(*launcher, EXAMPLES / "19_fused_matmul.py", cwd=tmp_path)
    chosen = re.findall(
        r"^(all_gather_matmul|matmul_reduce_scatter) of .* ranks: (\w+)", printed, re.MULTILINE
    )
    forms = ["plain", "plain", "fused", "fused", "plain", "plain"] if form == "auto" else ["chunked"] * 6
    assert chosen == [
        (op, form) for op, form in zip(["all_gather_matmul", "matmul_reduce_scatter"] * 3, forms, strict=True)
    ]
    assert printed.count("30.1 GFLOP on this rank, below") == (2 if form == "auto" else 0)
    assert printed.count("equal one process: outputs and gradients differ by") == 1
    assert len((EXAMPLES / "19_fused_matmul.py").read_text().splitlines()) < 80


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_say_what_they_are(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc and f"examples/{path.name}" in doc, "the docstring says how to run it"
