"""python -m pycomm.plan calibrate, on small products and buffers: its file is one that the planner reads."""

import pytest
import torch

from pycomm.parallel import Plan
from pycomm.parallel.planning import calibrate, load_machine, named
from pycomm.parallel.planning.job import PYCOMM, Job
from pycomm.parallel.planning.time import step_time

SMALL = {
    "SIZES": (16, 32, 64),
    "LARGE": 1 << 16,
    "TURNS": 2,
    "ATTENTION": (1, 2, 16, 8),
    "ELEMENTS": (32, 16),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_file_is_a_machine(ranks, monkeypatch, tmp_path, capsys):
    threads = torch.get_num_threads()
    for name, value in SMALL.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate, "_seconds", quick(calibrate._seconds))
    try:
        assert calibrate.main(["--ranks", str(ranks), "--out", str(tmp_path / "m.toml")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "written" in capsys.readouterr().out
    machine = load_machine(tmp_path / "m.toml")
    reached = machine.reached
    assert 0 < reached.attention <= 1 and 0 < reached.memory <= 1 and 0 <= reached.overlap <= 1
    assert ranks > 1 or reached.overlap == 1
    seconds = step_time(Job(named("gpt3-1.3b"), machine, Plan(dp=ranks), 8, 2, "none", PYCOMM)).total
    assert 0 < seconds < 1e6


def quick(function):
    return lambda call, least=0.0: function(call, 0.0)
