"""Accelerate, Lightning and DeepSpeed train over pycomm, unchanged, to the same parameters as over Gloo; and
Lightning under plans, to those of plain torch in one process.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import lightning_model
import pytest
import torch
from tiers import tier

SCRIPT = Path(__file__).with_name("framework_ranks.py")
LIMIT = 150  # seconds for both ranks; the imports take most of the 10 to 30 they need
FRAMEWORKS = {
    "accelerate": "accelerate",
    "lightning_fabric": "lightning",
    "lightning_trainer": "lightning",
    "deepspeed:1": "deepspeed",
    "deepspeed:2": "deepspeed",
    "deepspeed:3": "deepspeed",
}
BY_NAME_ONLY_GLOO = {"accelerate"}  # takes no name, so only PYCOMM_REPLACE brings pycomm there

pytestmark = [tier(slow=1), pytest.mark.frameworks, pytest.mark.timeout(3 * LIMIT)]


def train(framework, backend, folder, replace=None):
    """What rank 0 of two has written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYCOMM_")}
    environment.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0"
    )
    environment.update(
        TORCHELASTIC_RUN_ID="test", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true"
    )
    if replace:
        environment["PYCOMM_REPLACE"] = replace
    ranks = []
    for rank in range(2):
        ranks.append(
            subprocess.Popen(
                [sys.executable, SCRIPT, framework, backend, folder / "result"],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=open(folder / f"log{rank}", "w"),
                stderr=subprocess.STDOUT,
            )
        )
    try:
        codes = [rank.wait(LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = "\n".join(f"rank {rank}:\n{(folder / f'log{rank}').read_text()[-4000:]}" for rank in range(2))
    assert codes == [0, 0], logs
    return torch.load(folder / "result")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_trains_as_over_gloo(framework, tmp_path):
    pytest.importorskip(FRAMEWORKS[framework], reason="requirements-frameworks.txt is not installed")
    expected = train(framework, "gloo", tmp_path / "gloo")
    assert expected["used"] == ("gloo", "gloo")
    by_name = framework not in BY_NAME_ONLY_GLOO
    runs = [train(framework, "gloo", tmp_path / "replaced", replace="gloo")]
    if by_name:
        runs.append(train(framework, "pycomm", tmp_path / "named"))
    for run in runs:
        assert run["used"] == ("pycomm", "pycomm")
        assert len(run["parameters"]) == len(expected["parameters"])
        for actual, wanted in zip(run["parameters"], expected["parameters"], strict=True):
            assert actual.dtype == wanted.dtype and torch.equal(
                actual, wanted
            )  # two ranks: a sum of two has one rounding


@pytest.mark.parametrize(("framework", "epochs"), [("plan_trainer", 2), ("plan_fabric", 1)])
def test_lightning_under_plans(framework, epochs, tmp_path):
    pytest.importorskip("lightning", reason="requirements-frameworks.txt is not installed")
    parameters, steps, loss = lightning_model.train(epochs)
    for found in train(framework, "pycomm", tmp_path / "run"):
        assert found["backend"] == "pycomm"
        for state, its_steps, losses in found["runs"]:
            assert its_steps in (steps, None) and losses == pytest.approx([loss] * len(losses), rel=1e-6)
            for name, value in parameters.items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
        refused = found.get("refused", WORDS)
        assert refused.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in refused[name]


WORDS = {
    "accumulate": "accumulate_grad_batches > 1 (use microbatches)",
    "value": 'gradient_clip_algorithm="value"',
    "precision": 'precision="bf16-mixed" (use Plan(precision="bf16"))',
    "backward": "training_step has to return self.trainer.strategy.step(batch, loss_fn)",
    "hook": "a hook that is not called then (on_after_backward)",
}
