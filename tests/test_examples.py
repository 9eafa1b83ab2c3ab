"""Runs every example as a user would, with tiny settings, and checks what it prints and writes."""

import ast
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiers import tier

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


@tier(slow=1)
def test_train_gives_the_same_losses_again_and_over_gloo(trained, tmp_path):
    """With two ranks a sum has one order only, so that backends may not differ by a single bit."""
    first, *_ = trained
    again, _ = train("pycomm", tmp_path / "again", TORCHRUN)
    gloo, _ = train("gloo", tmp_path / "gloo")
    assert first["train_loss"] == again["train_loss"] == gloo["train_loss"]
    assert first["validation_loss"] == again["validation_loss"] == gloo["validation_loss"]


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
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    rows = [
        SimpleNamespace(backend=name, nbytes=8, best_us=us)
        for name, us in (("pycomm-torch", 5.0), ("gloo", 100.0))
    ]
    monkeypatch.setattr(demo, "bandwidth_demo", lambda out_png, ranks: SimpleNamespace(rows=rows))
    demo.main([f"--out={tmp_path / 'out'}", *TINY_TRAINING])
    printed = capsys.readouterr().out
    assert "= 20.0x" in printed and "nats per byte" in printed
    assert is_png(tmp_path / "out" / "loss.png")


@tier(quick=1 / 2)
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
