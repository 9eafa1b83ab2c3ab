"""python -m pycomm.benchmarks --hosts. What needs emulated hosts is skipped where they are not permitted."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tiers import tier

from pycomm import env
from pycomm.benchmarks.collectives import columns, command, mpi, runner
from pycomm.testing import emulated


def parsed(*words):
    return command.make_options(command.make_parser().parse_args(["all_reduce", *words]))


@pytest.mark.parametrize("placement", ["2x4", "3+5", "01010101"])
def test_options(placement):
    options = parsed("--hosts", placement, "--rate", "1gbit")
    assert (options.hosts, options.rate) == (placement, "1gbit")
    assert (options.ranks, options.ranks_as) == (8, "processes")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rate", "1gbit"], "--rate needs --hosts"),
        (["--hosts", "2x"], "placement '2x': must be like"),
        (["--hosts", "2x2", "--device", "cuda"], "--hosts needs --device cpu"),
    ],
)
def test_wrong_options(words, problem):
    with pytest.raises(ValueError, match=problem):
        parsed(*words)


def test_not_under_a_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--hosts starts its ranks itself, not under a launcher"):
        parsed("--hosts", "2x2")


@pytest.mark.parametrize(
    ("name", "hosts", "reason"),
    [
        ("mpi", "2x2", None),
        ("mpi:mpich", "1+2", None),
        ("mpi", "0101", "mpiexec is not asked to place ranks in turns"),
        ("gloo", "0101", None),
        ("deepspeed", "2x2", "its kernel is for one host"),
        ("deepspeed", None, None),
        ("pycomm:ucx", "2x2", None),
        ("pycomm:ucx", None, "UCX carries bytes between hosts (--hosts)"),
    ],
)
def test_who_is_left_out(name, hosts, reason):
    assert runner.why_not_on_hosts(name, hosts) == reason


@pytest.mark.parametrize("kind", ["intel", "mpich", "openmpi"])
def test_mpiexec_gets_hosts_and_a_way_to_them(tmp_path, kind):
    hosts = emulated.Hosts("1+2")
    hosts.keepers = [SimpleNamespace(pid=11), SimpleNamespace(pid=12)]
    found = mpi.Mpi("mpiexec", ["--oversubscribe", "-v"], None, None, kind)
    over = mpi.over_hosts(found, hosts, tmp_path)
    assert over.before[:3] == ("nsenter", "-t", "11") and over.flags[0] == "-v"
    assert str(tmp_path / "ssh") in over.flags
    assert str(tmp_path / "machines") in over.flags or "10.77.0.1:1,10.77.0.2:2" in over.flags
    assert (tmp_path / "machines").read_text() == "10.77.0.1:1\n10.77.0.2:2\n"
    # what they pass: options with and without a value, the host, the command in pieces
    told = (tmp_path / "ssh").read_text().replace("exec nsenter", "echo nsenter")
    said = ["-x", "-o", "Opt=1", "10.77.0.2", "orted", "a b"]
    done = subprocess.run(["sh", "-c", told, "ssh", *said], capture_output=True, text=True, timeout=20)
    assert done.stdout.startswith("nsenter -t 12 -n -m -u -i --wd=") and done.stdout.endswith("orted a b\n")
    wrong = subprocess.run(["sh", "-c", told, "ssh", "10.0.0.9", "x"], capture_output=True, timeout=20)
    assert wrong.returncode == 1


@tier(slow=1)
def test_a_run(tmp_path):
    path = tmp_path / "run.json"
    words = ["all_reduce", "--hosts", "2x1", "--rate", "1gbit", "--sizes", "8,64K", "--rounds", "1"]
    start = [sys.executable, "-m", "pycomm.benchmarks", *words, "--backends", "gloo", "--json", str(path)]
    done = subprocess.run(
        start, env=env.for_child(OMP_NUM_THREADS=1), capture_output=True, text=True, timeout=110
    )
    if done.returncode == emulated.SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert (content["settings"]["hosts"], content["settings"]["rate"]) == ("2x1", "1gbit")
    assert content["command"].endswith(f"--json {path}")
    assert [(row["backend"], row["size"], row["ranks"]) for row in content["rows"]] == [
        ("gloo", 8, 2),
        ("gloo", 65536, 2),
    ]
    line = "emulated hosts 2x1 on this machine, links of 1gbit each way"
    assert columns.hosts_line(content) == [line] and line in done.stdout


@tier(slow=1)
def test_where_hosts_cannot_be_emulated(tmp_path):
    start = [sys.executable, "-m", "pycomm.benchmarks", "all_reduce", "--hosts", "2x1"]
    done = subprocess.run(
        start, env=env.for_child(PATH=str(tmp_path)), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == emulated.SKIPPED and done.stderr.startswith("skip: --hosts: there is no ip")
