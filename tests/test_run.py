"""python -m pycomm.run: ranks are started, watched, replaced and ended."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import recovery_kills as kills
from tiers import tier

from pycomm.run.__main__ import parse

ROOT = Path(__file__).parents[1]
LIMIT = 200.0
pytestmark = pytest.mark.timeout(240)


def start(tmp_path, script, *options, arguments=()):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "pycomm.run", *options, str(path), *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def run(*args, **kwargs):
    process = start(*args, **kwargs)
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, sorted(out.splitlines()), err


def running(marker):
    """Processes whose command has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [number for number in found if number != os.getpid()]


def until(condition):
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_ranks_have_their_places_and_names(tmp_path):
    script = """
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], *sys.argv[1:], __name__)
        print("no end of line", end="", file=sys.stderr)
    """
    status, out, err = run(tmp_path, script, "--nproc", "3", arguments=["--lr", "0.1"])
    assert status == 0, err
    assert out == [f"[rank {rank}] {rank} 3 {rank} --lr 0.1 __main__" for rank in range(3)]
    assert sorted(err.splitlines()) == [f"[rank {rank}] no end of line" for rank in range(3)]


@tier(slow=1)
def test_torch_and_pycomm_find_each_other(tmp_path):
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("pycomm")
        x = torch.ones(1)
        dist.all_reduce(x)
        print(x.item(), dist.is_torchelastic_launched())
        dist.destroy_process_group()
    """
    status, out, err = run(tmp_path, script, "--nproc", "2")
    assert (status, out) == (0, ["[rank 0] 2.0 True", "[rank 1] 2.0 True"]), err


@tier(slow=1)
def test_errors_of_the_program_are_not_replaced_for_ever(tmp_path):
    """Each attempt fails; then the status is that of the first, and nobody is left."""
    script = """
        import sys, time
        if __import__("os").environ["RANK"] == "1":
            raise SystemExit(7)
        time.sleep(3)
    """
    status, _, err = run(
        tmp_path, script, "--nproc", "2", "--replacements", "2", arguments=["fails-for-ever"]
    )
    assert status == 7
    assert err.count("replacement 1 of 2") == err.count("replacement 2 of 2") == 1
    assert "rank 1, replacement 2 ended with status 7 before it was taken in, and is not replaced" in err
    assert not running("fails-for-ever")


@tier(slow=1)
def test_a_replacement_that_nobody_takes_in_ends_with_the_others(tmp_path):
    script = """
        import os, signal, time
        if os.environ["PYCOMM_REPLACEMENT"] != "0":
            time.sleep(1000)
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
    """
    status, _, err = run(tmp_path, script, "--nproc", "2", arguments=["nobody-takes"])
    assert "rank 0 was killed by signal 9: replacement 1 of 3" in err and "nobody is left" in err
    assert status == 0 and not running("nobody-takes")


@pytest.mark.parametrize(
    ("number", "deaf"),
    [(signal.SIGINT, False), pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow)],
)
def test_a_signal_ends_all(tmp_path, number, deaf):
    """Also ranks that do not listen, and what they have started."""
    marker = f"ends-{number.name}"
    script = f"""
        import signal, subprocess, sys, time
        if {deaf}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", {marker!r}])
        print("ready", flush=True)
        time.sleep(1000)
    """
    process = start(tmp_path, script, "--nproc", "2", arguments=[marker])
    for _ in range(2):
        assert process.stdout.readline().endswith("ready\n")
    process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    until(lambda: not running(marker))


@tier(slow=1)
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    script = "import time; print('ready', flush=True); time.sleep(1000)"
    process = start(tmp_path, script, "--nproc", "2", arguments=["launcher-dies"])
    for _ in range(2):
        assert process.stdout.readline().endswith("ready\n")
    process.kill()
    process.communicate(timeout=LIMIT)
    until(lambda: not running("launcher-dies"))


@tier(slow=1)
def test_a_killed_rank_is_replaced(tmp_path):
    """In a training: the new process goes on where the others are; the losses are those of one process."""
    script = """
        import os, signal, sys
        sys.path.insert(0, os.path.join(sys.argv[1], "tests"))
        import recovery_kills as kills, pycomm.parallel as par
        run = par.resilient(*kills.make(), par.Plan(dp=2, zero=1), snapshot_every=2, wait=100)
        for number in run.steps(kills.STEPS):
            if number == 5 and os.environ["RANK"] == "1" and os.environ["PYCOMM_REPLACEMENT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = run.step(kills.batch(number), clip=1.0, microbatches=2)
        print(run.plan, abs(loss.item() - float(sys.argv[2])) < kills.TOLERANCE)
    """
    alone = kills.alone(False).loss
    status, out, err = run(tmp_path, script, "--nproc", "2", arguments=[str(ROOT), repr(alone)])
    assert status == 0 and out == ["[rank 0] dp=2,zero=1 True", "[rank 1'1] dp=2,zero=1 True"], err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["script.py"], "--nproc"),
        (["--nproc", "0", "script.py"], "0: must be 1 or more"),
        (["--nproc", "2", "--replacements", "-1", "script.py"], "-1: must be 0 or more"),
        (["--nproc", "2"], "script"),
    ],
)
def test_wrong_command_lines(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2 and words in capsys.readouterr().err
