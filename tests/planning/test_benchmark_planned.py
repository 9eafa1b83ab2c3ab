"""python -m pycomm.benchmarks planned: the command, its figures, what it counts as a wrong order."""

import json

import pytest
import torch

from pycomm.benchmarks import planned

SMALL = "--dim 32 --layers 2 --vocab 64 --rows 4 --length 16 --microbatches 2 --rounds 1 --steps 1".split()


def row(plan, measured, predicted):
    return {"plan": plan, "measured_ms": measured, "predicted_ms": predicted}


def test_what_is_in_the_wrong_order():
    rows = [row("a", 100, 90), row("b", 120, 80), row("c", 105, 70), row("d", 200, 300)]
    assert planned.misplaced(rows) == [("a", "b")]  # c is within 10% of a, d is where it belongs


def test_command(tmp_path, capsys):
    threads = torch.get_num_threads()
    files = ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
    plans = "dp=2;pp=2"
    try:
        assert planned.main([*SMALL, "--plans", plans, "--machine", "cpu", "--timeout", "100", *files]) == 0
    finally:
        torch.set_num_threads(threads)
    written = json.loads((tmp_path / "out.json").read_text())
    assert [found["plan"] for found in written["rows"]] == plans.split(";")
    for found in written["rows"]:
        assert found["error"] == pytest.approx(found["predicted_ms"] / found["measured_ms"] - 1)
        assert sum(found["parts_ms"].values()) == pytest.approx(found["predicted_ms"])
    assert "| dp=2 |" in (tmp_path / "out.md").read_text() and "Mean error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--plans", "dp=3"], "dp=3"),
        (["--machine", "z80"], "known are"),
        (["--dim", "33"], "multiple of 32"),
        (["--plans", "ring"], "ring"),
    ],
)
def test_wrong_arguments(arguments, text, capsys):
    with pytest.raises(SystemExit) as ended:
        planned.main([*SMALL, "--machine", "cpu", *arguments])
    assert ended.value.code == 2 and text in capsys.readouterr().err
