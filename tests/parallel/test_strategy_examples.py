"""Runs every example of a strategy as a user would and checks what it prints. They compare themselves with a
single process and fail.

Each runs in a fork of this process, which has torch imported, and starts its own ranks from there; one runs
under torchrun too.
"""

import importlib
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from tiers import tier
from torch_ranks import spawn

import pycomm.parallel as par
from pycomm.parallel.pipeline import NAMES

torch.optim.SGD(
    [torch.zeros(1)], lr=0.1
)  # the first optimizer imports half a second of modules: once, and not in every fork

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 240  # of an example: on cores that others use, too
ALONE = "equals? one process: losses differ by"
TEXT = [
    "--text-bytes=200000",
    "--layers=2",
    "--dim=32",
    "--heads=2",
    "--sequence=32",
    "--batch=8",
    "--validate-every=9",
]

PRINTED = {  # example -> patterns of what it prints
    "04_naive_data_parallel": [r"492,352 bytes into rank 0", ALONE],
    "05_ddp": [r"7 buckets, 245,760 bytes sent = 1\.00 x the gradients", ALONE],
    "06_model_parallel": [r"5248 \+ 3120 \+ 392 = 8760", ALONE],
    "07_pipeline": [
        r"5 schedules on 2 ranks give the same bits",
        r"rank 3  \.  \.  \.  F0 B0 W0 F1",
        r"bubble 27%",
        r"bubble 0%",
    ],
    "08_tensor_parallel": [r"blocks\.3\.attention +attention", r"20 all_reduce over tp", ALONE],
    "09_megatron_sequence_parallel": [
        r"55,296 bytes with tp, 27,648 with megatron_sp",
        r"'all_reduce': 4, 'all_gather': 18",
        ALONE,
    ],
    "10_ulysses": [r"16 all_to_all", ALONE],
    "11_ring_attention": [r"rank 0 holds positions \[0, 1, 2, 3, 20, 21, 22, 23\]", ALONE],
    "12_zero": [r"zero=0: sends .* = 2\.00 P", r"zero=1: .* 0\.67 P", r"zero=3: sends .* = 3\.0\d P", ALONE],
    "13_offload": [r"offload=parameters: model on cpu", ALONE],
    "14_expert_parallel": [r"rank 1: 2 of 5 experts", ALONE],
    "15_pipedream": [r"F0 F1 \.  \.  B0 W0 U0", r"with one microbatch equals one process"],
    "16_checkpoint_between_plans": [r"loaded under tp=2 +the same bits", ALONE],
    "17_compression": [r"bf16 .* 1/2\.0 of fp32", r"topk .* 1/10\.0", r"stays near one process"],
    "20_lora_llama": [
        r"dp=2,tp=2 +loss 4\.\d+ -> 4\.\d+; 24 adapters trained and saved",
        r"dp=2,pp=2,zero=1 +equals one process",
        ALONE,
    ],
    "21_hsdp": [
        r"'all': 4\.\d+ P over the link",
        r"'host': 1\.00 P over the link",
        r"hosts +2 hosts x 2: no axis inside",
        r"among the 2 of a host",
        ALONE,
    ],
    "22_ddp_goes_on": [
        r"step 2: \[rank 0/4.*rank 1 died",
        r"step 2 again on 3 ranks",
        r"3 of 4 ranks end with the losses of one process",
    ],
    "23_train_through_kills": [
        r"Plan\(dp=3,zero=1\) at the end, 1 step taken again",
        r"differ from those of one process by \d(e-\d\d)?",
        r"3 of 4 ranks went on",
    ],
    "24_plan_itself": [
        r"chosen: Plan\(dp=2",
        r"rank 0 sends ([\d,]+) bytes in a step; dry_run said \1\n",
        ALONE,
    ],
    "26_packing": [r"pp=2 +4 rows equal 9 documents: \de-1\d", r"ring=2 +4 rows equal 9 documents"],
    "25_trace": [r"dp +all_reduce", r"waiting ms", r"python -m pycomm.trace .* draws it"],
    "27_ema": [r"5 updates; loss of the model \d\.\d+, of its average \d\.\d+", ALONE],
    "18_hybrid": [r"dp=2,tp=2,pp=2,zero=1 +rank 0 sends", r"4 hybrids on 8 ranks", ALONE],
}


def run_in_fork(script, *flags, cwd):
    """What `python script *flags` prints; fails with all of it when it raises or does not end."""
    log = cwd / "printed"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()  # so that the ranks can be ended with it
            os.chdir(cwd)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
            sys.argv, sys.path[0:0] = [str(script), *flags], [str(script.parent)]
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended[0] == 0:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    text = log.read_text() if log.exists() else ""
    assert ended[0], f"{script.name} did not end within {SECONDS} s\n{text}"
    assert ended[1] == 0, f"{script.name} failed\n{text}"
    return text


@tier(slow=1 / 8)
@pytest.mark.parametrize("name", PRINTED)
def test_example(name, tmp_path):
    flags = ["--pictures=pictures"] if name == "07_pipeline" else []
    printed = run_in_fork(EXAMPLES / f"{name}.py", *flags, cwd=tmp_path)
    for pattern in PRINTED[name]:
        assert re.search(pattern, printed), f"{pattern!r} is not in\n{printed}"
    if name == "07_pipeline":
        assert sorted(path.stem for path in (tmp_path / "pictures").iterdir()) == [
            "1f1b",
            "gpipe",
            "interleaved",
            "zb-h1",
            "zbv",
        ]


def test_each_example_is_here_and_short():
    others = {"01_all_reduce", "02_train_gpt_ddp", "03_compare_ddp_step", "19_fused_matmul"}
    found = {path.stem for path in EXAMPLES.glob("[0-9]*.py")} - others
    assert found == set(PRINTED)
    for name in found:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80, name


@tier(slow=1)
def test_under_torchrun(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(EXAMPLES / "05_ddp.py"),
    ]
    done = subprocess.run(command, cwd=tmp_path, timeout=SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("DDP on 2 ranks equals one process") == 1


def losses(printed):
    """{"train": (first, last), "validation": (first, last)} as train_gpt.py prints them."""
    return {
        kind: (float(a), float(b))
        for kind, a, b in re.findall(r"(train|validation) loss +([\d.]+) -> ([\d.]+)", printed)
    }


@tier(slow=1)
def test_train_gpt_gives_the_same_losses_under_every_plan(tmp_path):
    script, flags = EXAMPLES / "train_gpt.py", [*TEXT, "--steps=3"]
    alone = losses(run_in_fork(script, "--plan=", *flags, "--plot=", cwd=tmp_path))
    assert (
        alone["train"][0] == pytest.approx(5.55, abs=0.05)
        and alone["validation"][1] < alone["validation"][0] - 0.05
    )
    for plan in ("dp=2,tp=2,pp=2,zero=1", "ring=2,zero=3,checkpoint"):
        printed = run_in_fork(script, f"--plan={plan}", *flags, "--plot=loss.png", cwd=tmp_path)
        for kind, values in losses(printed).items():
            assert values == pytest.approx(alone[kind], abs=2e-4), (plan, kind)
        assert "tokens/s" in printed and (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@tier(slow=1)
def test_train_gpt_goes_on_from_a_checkpoint_of_another_plan(tmp_path):
    script = EXAMPLES / "train_gpt.py"
    first = losses(
        run_in_fork(script, "--plan=dp=2,zero=1", *TEXT, "--steps=2", "--save=saved", "--plot=", cwd=tmp_path)
    )
    printed = run_in_fork(
        script, "--plan=tp=2", *TEXT, "--steps=4", "--resume=saved", "--plot=", cwd=tmp_path
    )
    then = losses(printed)
    assert (
        "4 steps" in printed
        and then["train"][0] == first["train"][0]
        and then["validation"][0] == first["validation"][0]
    )
    assert then["validation"][1] < first["validation"][1]


def test_train_gpt_in_bf16(tmp_path):
    printed = run_in_fork(
        EXAMPLES / "train_gpt.py",
        "--plan=dp=2",
        "--precision=bf16",
        *TEXT,
        "--steps=2",
        "--plot=",
        cwd=tmp_path,
    )
    assert "dp=2,precision=bf16" in printed and losses(printed)["validation"][1] < 5.6


DOCS = (EXAMPLES.parent / "docs" / "strategies.md").read_text()


def test_schedules_in_the_docs():
    grids = re.findall(r"```\n((\S+): pp (\d), chunks \d, microbatches (\d)\n.*?)\n```", DOCS, re.DOTALL)
    assert [name for _, name, _, _ in grids] == list(NAMES)
    for text, name, stages, microbatches in grids:
        assert text == par.pipeline.make_schedule(name, int(stages), int(microbatches)).text()


@pytest.mark.parametrize(
    "text", sorted(set(re.findall(r"(?<!\w)(?:par\.)?(Plan\((?:[^()]|\([^()]*\))*\))", DOCS)))
)
def test_plans_in_the_docs(text):
    if (
        "make_compression" not in text
        and "blocks=...)" not in text
        and "compression='int8', zero=1" not in text
    ):
        assert eval(text, {"Plan": par.Plan}).world_size >= 1


def traffic_of(rank, world_size, plans):
    """Bytes sent in the second step of each plan: (all, in point-to-point messages)."""
    sys.path.insert(0, str(EXAMPLES))
    common, sent = importlib.import_module("common"), []
    for plan in plans:
        model, opt = par.parallelize(*common.make(layers=6), par.Plan.parse(plan))
        for batch in common.batches(2):
            with par.count_traffic() as traffic:
                par.step(model, opt, batch, microbatches=3)
        sent.append((traffic.nbytes() - traffic.nbytes(group="world"), traffic.nbytes("send")))
    return sent


@tier(slow=1)
def test_bytes_in_the_docs():
    """The closed forms of docs/strategies.md on 3 ranks; small parts of a step that they leave out are
    written out here.
    """
    n, layers, e, vocab, width, tokens, microbatches = 3, 6, 8, 50, 24, 12 * 24, 3
    tied = vocab * width * e
    size = tied + e * (24 * width + layers * (12 * width**2 + 13 * width) + 2 * width)
    hidden, share = tokens * width * e, (n - 1) / n
    gradients = 2 * share * size
    forms = {
        "dp=3": (gradients, 0),
        "dp=3,zero=1": (gradients, 0),
        "dp=3,zero=2": ((microbatches + 1) * share * size, 0),
        "dp=3,zero=3": (
            microbatches * share * (3 * size + tied),
            0,
        ),  # the tied weight is gathered for each of its places
        "tp=3": (
            8 * share * layers * hidden + 2 * 2 * share * hidden + 2 * share * 3 * tokens * e,
            0,
        ),  # and embedding, head, loss
        "pp=3": (None, (hidden + tied, 2 * hidden, hidden + tied)),
        "ulysses=3": (layers * 8 * hidden / n * share + gradients, 0),
        "ring=3": (None, layers * 3 * (n - 1) * 2 * hidden / n),
    }
    for rank, found in enumerate(spawn(n, traffic_of, list(forms))):
        for (plan, (total, messages)), (sent, in_messages) in zip(forms.items(), found, strict=True):
            messages = messages[rank] if isinstance(messages, tuple) else messages
            assert total is None or sent == pytest.approx(total, rel=2e-3), (rank, plan)
            assert in_messages == messages, (rank, plan)
