"""pycomm.doctor: what it concludes from made-up facts, and that it finds the facts of this machine."""

import concurrent.futures
import dataclasses
import datetime
import json
import re
import subprocess
import sys
import threading
import types

import pytest
import torch
import torch.distributed as dist
from tiers import tier

from pycomm import env
from pycomm.doctor import __main__ as command
from pycomm.doctor import checks, facts, ranks
from pycomm.doctor.facts import Extension, Facts, Gpus, Group

GOOD = Facts(
    rank=0,
    host="a",
    python="3.11.7",
    versions={"pycomm": "0.1.0", "torch": "2.13.0", "triton": "3.7.1", "cupy": None, "nccl4py": None},
    extension=Extension(None, "2.13.0", "avx2", True, ["80", "90"]),
    cores=[0, 1],
    machine_cores=2,
    load=0.1,
    numa={"0": [0, 1]},
    max_files=None,
    max_locked=None,
    autogroup=None,
    huge_pages="advise",
    gpus=Gpus(None),
    settings={},
    settings_problem=None,
    group=Group(None, 2, "process_vm_readv", 1.1),
)
TWO_GPUS = Gpus(None, ["H100", "H100"], [], ["90", "90"])
NO_KERNELS = Extension(None, "2.13.0", "avx2", False)

ONLY_SM_90 = Extension(None, "2.13.0", "avx2", True, ["90"])

# what differs from GOOD -> name and state of the finding, words in its text, is pycomm unusable
CASES = [
    ({}, "versions", "ok", "torch 2.13.0", False),
    ({"versions": {**GOOD.versions, "torch": None}}, "versions", "missing", "not installed", True),
    ({"versions": {**GOOD.versions, "torch": "2.10.1"}}, "versions", "missing", "2.11 to 2.15", True),
    ({"versions": {**GOOD.versions, "torch": "2.11.0a0+git1"}}, "versions", "ok", "2.11.0", False),
    ({"versions": {**GOOD.versions, "torch": "2.15.0+cu130"}}, "versions", "ok", "2.15.0", False),
    ({"versions": {**GOOD.versions, "torch": "2.16.0"}}, "versions", "missing", "2.11 to 2.15", True),
    ({"versions": {**GOOD.versions, "torch": "3.12.0"}}, "versions", "missing", "2.11 to 2.15", True),
    ({"extension": Extension("ImportError: not built")}, "extension", "missing", "make build", True),
    ({"extension": NO_KERNELS}, "extension", "ok", "without CUDA kernels", False),
    ({"extension": NO_KERNELS}, "extension", "ok", "`PYCOMM_CUDA=1 make build`", False),
    ({"extension": NO_KERNELS, "gpus": TWO_GPUS}, "extension", "missing", "PYCOMM_CUDA=1 pip install", False),
    ({"gpus": TWO_GPUS}, "extension", "ok", "with CUDA kernels for sm_80, sm_90", False),
    ({"extension": ONLY_SM_90, "gpus": TWO_GPUS}, "extension", "ok", "kernels for sm_90", False),
    ({"versions": {**GOOD.versions, "triton": None}}, "optional packages", "ok", "triton not", False),
    (
        {"versions": {**GOOD.versions, "triton": None}, "gpus": TWO_GPUS},
        "optional packages",
        "missing",
        "3.6 to 3.9",
        False,
    ),
    ({"settings": {"PYCOMM_LOG": "debug"}}, "environment", "ok", "PYCOMM_LOG=debug", False),
    ({"settings": {"PYCOMM_LGO": "debug"}}, "environment", "missing", "does not know PYCOMM_LGO", False),
    ({"settings": {"PYCOMM_CUDA": "1", "PYCOMM_CUDA_ARCH": "90"}}, "environment", "ok", "ARCH=90", False),
    ({"settings_problem": "PYCOMM_CMA='x'"}, "environment", "missing", "PYCOMM_CMA='x'", True),
    ({}, "cores", "ok", "up to 2 ranks", False),
    ({"cores": [0]}, "cores", "ok", "1 of 2 may be used", False),
    ({}, "NUMA", "ok", "1 node", False),
    ({"numa": {"0": [0], "1": [1]}}, "NUMA", "slow", "numactl", False),
    ({"numa": {"0": [0], "1": [1]}, "cores": [1]}, "NUMA", "ok", "may run on 1", False),
    ({"numa": {}}, "NUMA", "ok", "1 node", False),
    ({}, "shared memory", "ok", "/dev/shm is not needed", False),
    ({"huge_pages": "never"}, "shared memory", "ok", "shmem_enabled", False),
    ({}, "peers' memory", "ok", "process_vm_readv", False),
    ({"group": Group(None, 2, "staging only", 1.1)}, "peers' memory", "slow", "ptrace_scope", False),
    (
        {"group": Group(None, 2, "staging only", 1.1), "settings": {"PYCOMM_CMA": "0"}},
        "peers' memory",
        "slow",
        "unset PYCOMM_CMA",
        False,
    ),
    ({}, "group", "ok", "1.1 us", False),
    ({"group": Group(None, 2, "staging only", 30.0)}, "group", "ok", "30.0 us", False),
    ({"group": Group(None, 2, "staging only", 30.1)}, "group", "slow", "uptime", False),
    ({"group": Group(None, 2, "staging only", 90.0), "cores": [0]}, "group", "ok", "90.0 us", False),
    ({"group": Group("PeerError: rank 1 died")}, "group", "missing", "rank 1 died", True),
    ({"group": None}, "group", "missing", "not tried", False),
    ({"max_files": 256, "max_locked": 8 << 20}, "limits", "slow", "ulimit -n", False),
    ({"max_files": 1023}, "limits", "slow", "ulimit -n", False),
    ({"max_files": 1024, "max_locked": 8 << 20}, "limits", "ok", "8192 KiB", False),
    ({}, "GPUs", "ok", "CPU tensors only", False),
    ({"gpus": Gpus("torch 2.13.0 is built without CUDA")}, "GPUs", "missing", "nvidia-smi", False),
    ({"gpus": TWO_GPUS}, "GPUs", "ok", "2: H100", False),
    ({"gpus": Gpus(None, ["H100"] * 2, [[0, 1], [1, 0]])}, "GPUs", "missing", "peer access 0-1", False),
    ({}, "autogroup", "ok", "off", False),
    ({"autogroup": "/autogroup-3"}, "autogroup", "ok", "on; costs nothing", False),
]


def of(findings, name):
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def with_ranks(count, **changes):
    return [dataclasses.replace(GOOD, rank=rank, **changes) for rank in range(count)]


@pytest.mark.parametrize(("changes", "name", "state", "words", "fatal"), CASES)
def test_finding(changes, name, state, words, fatal):
    found = of(checks.judge([dataclasses.replace(GOOD, **changes)]), name)
    assert (found.state.value, found.fatal) == (state, fatal)
    assert words in f"{found.found} {found.mend}"
    assert found.state is checks.State.ok or found.mend or changes.get("group", True) is None


def test_a_good_machine_has_nothing_to_mend():
    assert all(finding.state is checks.State.ok for finding in checks.judge([GOOD]))


def test_ranks_that_differ_are_named():
    answers = with_ranks(3)
    answers[2] = dataclasses.replace(answers[2], max_files=64)
    assert of(checks.judge(answers), "limits").found.startswith("rank 2: open files 64")


def test_more_ranks_than_cores():
    answers = with_ranks(3)
    assert of(checks.judge(answers), "cores").state is checks.State.slow
    assert of(checks.judge(answers), "autogroup").state is checks.State.ok
    apart = [dataclasses.replace(one, autogroup=f"/autogroup-{one.rank}") for one in answers]
    found = of(checks.judge(apart), "autogroup")
    assert found.state is checks.State.slow and "sched_autogroup_enabled=0" in found.mend
    pinned = [dataclasses.replace(one, cores=[one.rank]) for one in apart]  # a core for each
    assert of(checks.judge(pinned), "autogroup").state is checks.State.ok


def test_the_slowest_rank_counts():
    answers = with_ranks(2)
    answers[1] = dataclasses.replace(answers[1], group=Group(None, 2, "process_vm_readv", 77.0))
    assert "77.0 us" in of(checks.judge(answers), "group").found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"python": "3.12.1"}, "one Python environment"),
        ({"versions": {**GOOD.versions, "torch": "2.14.0"}}, "one Python environment"),
    ],
)
def test_ranks_that_do_not_fit_together(change, words):
    answers = with_ranks(2)
    answers[1] = dataclasses.replace(answers[1], **change)
    found = of(checks.judge(answers), "ranks")
    assert found.fatal and words in found.mend


def test_ranks_on_two_nodes():
    answers = with_ranks(2)
    answers[1] = dataclasses.replace(answers[1], host="another")
    found = of(checks.judge(answers), "ranks")
    assert found.state is checks.State.ok and "2 nodes" in found.found and "another" in found.found


def test_nodes_are_named_in_their_order():
    answers = [dataclasses.replace(GOOD, rank=rank, host=f"node{9 - rank // 2}") for rank in range(12)]
    found = of(checks.judge(answers), "ranks")
    assert found.found == "12 on 6 nodes: node4, node5, node6, node7, node8, node9"
    assert of(checks.judge(answers[:2]), "ranks").found == "2 on one node"
    assert not [one for one in checks.judge(answers[:1]) if one.name == "ranks"]


def test_a_rank_without_an_answer():
    found = of(checks.judge(with_ranks(2), silent=[2, 3]), "ranks")
    assert found.fatal and "2, 3" in found.found


def test_facts_travel_as_json():
    sent = json.dumps(dataclasses.asdict(GOOD))
    assert ranks.from_json(json.loads(sent)) == GOOD


def test_facts_of_this_machine():
    """Plain values, and nothing raises; the group is tried apart."""
    found = facts.gather()
    assert found.extension.problem is None and found.cores and found.group is None
    assert ranks.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


@pytest.mark.parametrize(
    ("built", "gpu", "runs"),
    [
        ("80 90", "80", True),
        ("80 90", "86", True),  # a later minor version
        ("80 90", "75", False),
        ("80 90", "120", True),  # the driver compiles the PTX of sm_90
        ("90", "90", True),
        ("90", "80", False),
        ("90", "100", False),  # one architecture alone has no PTX
        ("86", "80", False),
        ("100", "103", True),
        ("", "80", True),  # an older build does not say
    ],
)
def test_kernels_that_run_on_no_gpu_are_found(built, gpu, runs):
    extension = Extension(None, "2.13.0", "avx2", True, built.split())
    gpus = Gpus(None, ["one", "H100"], [], [gpu, "90"])
    found = of(checks.judge([dataclasses.replace(GOOD, extension=extension, gpus=gpus)]), "extension")
    assert (found.state is checks.State.missing) == (not runs or not checks._runs_on("90", built.split()))
    assert runs or (f"sm_{gpu}" in found.mend and "PYCOMM_CUDA=1 make build" in found.mend)


@pytest.mark.parametrize("info", [{}, {"CUDA_ARCHITECTURES": ("80", "90")}, {"CUDA_ARCHITECTURES": ()}])
def test_what_was_built(monkeypatch, info):
    """_build_info.py says for which architectures; that of an older build does not."""
    module = types.ModuleType("pycomm._build_info")
    module.TORCH_VERSION = "2.13.0"
    vars(module).update(info)
    monkeypatch.setitem(sys.modules, "pycomm._build_info", module)
    found = facts._extension()
    assert found.problem is None and found.architectures == list(info.get("CUDA_ARCHITECTURES", ()))


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0-2,5", [0, 1, 2, 5]), ("", []), ("7,9-10", [7, 9, 10])]
)
def test_lists_of_cores(text, numbers):
    assert facts._numbers(text) == numbers


def test_variables_are_those_of_the_table():
    table = re.findall(r"^    (PYCOMM_\w+)", env.__doc__, re.M)
    assert sorted(env.VARIABLES) == sorted(table)


WRONG_VALUES = {
    "PYCOMM_TIMEOUT": "0",
    "PYCOMM_ALGORITHM": "all_reduce",
    "PYCOMM_REPLACE": "mpi",
    "PYCOMM_HOST_TIMEOUT": "nan",
    "PYCOMM_PORT_RANGE": "5-4",
    "PYCOMM_WIRE": "tcp",
    "PYCOMM_NCCL_CHECKS": "1",
    "PYCOMM_THREADS": "0",
    "PYCOMM_STAGING_BYTES": "8MB",
    "PYCOMM_CMA": "2",
    "PYCOMM_CUDA_PROTOCOL": "spin",
    "PYCOMM_CUDA_STAGING_BYTES": "0",
    "PYCOMM_FUSED": "1",
    "PYCOMM_REPLACEMENT": "first",
    "PYCOMM_TRACE_BYTES": "0",
    "PYCOMM_STATISTICS": "on",
    "PYCOMM_METRICS_PORT": "65536",
    "PYCOMM_LOG": "loud",
}
ANY_VALUE = {"PYCOMM_HOST_ID", "PYCOMM_SOCKET_IFNAME", "PYCOMM_TUNED", "PYCOMM_CACHE", "PYCOMM_TRACE"}


@pytest.mark.parametrize("name", env.VARIABLES)
def test_a_wrong_value_of_any_variable_is_found(name, monkeypatch):
    for variable in env.set_variables():
        monkeypatch.delenv(variable)
    assert facts._settings_problem() is None
    env.logger.cache_clear()
    monkeypatch.setenv(name, WRONG_VALUES.get(name, "any"))
    try:
        problem = facts._settings_problem()
    finally:
        env.logger.cache_clear()
    assert problem is None if name in ANY_VALUE else problem.startswith(f"{name}={WRONG_VALUES[name]!r} in")


def test_what_is_wrong_on_some_ranks_is_said_with_them_alone():
    """Of several kinds of findings the worst, and the ranks that have it."""
    answers = with_ranks(5, numa={"0": [0], "1": [1]}, cores=[0])
    for rank in (0, 4):
        answers[rank] = dataclasses.replace(answers[rank], cores=[0, 1])
    found = of(checks.judge(answers), "NUMA")
    assert found.state is checks.State.slow and found.found.startswith("ranks 0, 4: 2 node(s)")
    answers[3] = dataclasses.replace(answers[3], extension=Extension("ImportError: none"))
    answers[1] = dataclasses.replace(answers[1], extension=NO_KERNELS, gpus=TWO_GPUS)
    found = of(checks.judge(answers), "extension")
    assert found.fatal and found.found == "rank 3: ImportError: none"
    answers[0] = dataclasses.replace(answers[0], group=Group("PeerError: rank 4 died"))
    found = of(checks.judge(answers), "group")
    assert found.fatal and found.found == "rank 0: PeerError: rank 4 died"
    answers[2] = dataclasses.replace(answers[2], group=None)
    assert "not tried" in of(checks.judge(answers), "group").found


# --- ranks that a launcher has started --------------------


def asked(monkeypatch, world_size, silent=(), **problems):
    """What ask_all returns on each rank, and the ranks that made a group; those in `silent` do not come."""
    store, place, tried = dist.HashStore(), threading.local(), []

    def try_ranks(store, rank, size):
        tried.append(rank)
        return Group(None, size, "process_vm_readv", 1.0 + rank)

    def gather(rank=0):
        return dataclasses.replace(GOOD, rank=rank, group=None, **problems.get(f"rank_{rank}", {}))

    def launch():
        return env.Launch(place.rank, world_size, 0, "localhost", 1)

    def body(rank):
        place.rank = rank
        return ranks.ask_all()

    monkeypatch.setattr(env, "set_launch", launch)
    monkeypatch.setattr(dist, "rendezvous", lambda url, rank, size, timeout: iter([(store, rank, size)]))
    monkeypatch.setattr(facts, "gather", gather)
    monkeypatch.setattr(facts, "try_ranks", try_ranks)
    hear, never = ranks._hear, {f"facts/{rank}" for rank in silent}
    monkeypatch.setattr(ranks, "_hear", lambda store, key: None if key in never else hear(store, key))
    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        works = {rank: pool.submit(body, rank) for rank in range(world_size) if rank not in silent}
        return {rank: work.result(100) for rank, work in works.items()}, sorted(tried)


def test_rank_0_has_the_facts_of_all(monkeypatch):
    found, tried = asked(monkeypatch, 3)
    answers, silent = found[0]
    assert [(one.rank, one.group.ranks, one.group.all_reduce_us) for one in answers] == [
        (0, 3, 1.0),
        (1, 3, 2.0),
        (2, 3, 3.0),
    ]
    assert (silent, tried, found[1], found[2]) == ([], [0, 1, 2], None, None)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "problem", [{"settings_problem": "PYCOMM_CMA='x'"}, {"extension": Extension("none")}]
)
def test_no_group_is_tried_where_one_rank_cannot(rank, problem, monkeypatch):
    found, tried = asked(monkeypatch, 3, **{f"rank_{rank}": problem})
    answers, silent = found[0]
    assert [one.rank for one in answers] == [0, 1, 2] and not silent and not tried
    findings = checks.judge(answers)
    assert of(findings, "group").found.startswith("not tried") and any(one.fatal for one in findings)


@pytest.mark.parametrize("absent", [1, 2])
def test_a_rank_that_does_not_come(absent, monkeypatch):
    found, tried = asked(monkeypatch, 3, silent=(absent,))
    answers, silent = found[0]
    assert ([one.rank for one in answers], silent, tried) == ([0, 3 - absent], [absent], [])


def test_what_does_not_come_in_time_is_none(monkeypatch):
    store = dist.HashStore()
    ranks._tell(store, "a", {"x": [False]})
    assert ranks._hear(store, "a") == {"x": [False]}
    monkeypatch.setattr(ranks, "ANSWER", datetime.timedelta(seconds=0.01))
    assert ranks._hear(store, "b") is None


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_speaks(rank, monkeypatch, capsys):
    """It reports the findings of all; the exit status says whether pycomm can be used."""
    answers = with_ranks(2)
    monkeypatch.setattr(env, "launched", lambda: True)
    monkeypatch.setattr(ranks, "ask_all", lambda: (answers, [7]) if rank == 0 else None)
    assert command.main([]) == (1 if rank == 0 else 0)
    said = capsys.readouterr().out
    assert (
        said.endswith("\n\npycomm cannot be used here.\n") and "no answer from 7" in said
        if rank == 0
        else not said
    )
    assert command.main(["--json"]) == (1 if rank == 0 else 0)
    said = capsys.readouterr().out
    if rank == 0:
        report = json.loads(said)
        assert report["usable"] is False and [one["rank"] for one in report["facts"]] == [0, 1]
        assert report["findings"][0] | {"mend": ""} == {
            "name": "ranks", "state": "missing", "found": "no answer from 7", "mend": "", "fatal": True,
        }  # fmt: skip


# --- this machine --------------------


def test_gpus_and_who_reaches_whose_memory(monkeypatch):
    monkeypatch.setattr(facts.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9 + number, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b != 2)
    names, architectures = ["GPU 0", "GPU 1", "GPU 2"], ["90", "100", "110"]
    assert facts._gpus() == Gpus(None, names, [[0, 2], [1, 2]], architectures)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no usable GPU" in facts._gpus().problem
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in facts._gpus().problem


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        ({"sched_autogroup_enabled": "0", "autogroup": "/autogroup-7 nice 0"}, None),
        ({"sched_autogroup_enabled": "1", "autogroup": "/autogroup-7 nice 0"}, "/autogroup-7"),
        ({"sched_autogroup_enabled": "1"}, "unknown"),
    ],
)
def test_the_group_of_the_scheduler(files, found, monkeypatch):
    monkeypatch.setattr(facts, "_read", lambda path: files.get(path.rsplit("/", 1)[1]))
    assert facts._autogroup() == found


@pytest.mark.parametrize(
    ("text", "word"), [("always [never] x", "never"), ("[always] x", "always"), (None, None)]
)
def test_the_word_in_brackets(text, word, monkeypatch):
    monkeypatch.setattr(facts, "_read", lambda path: text)
    assert facts._chosen("a path") == word


def test_limits_of_this_process(monkeypatch):
    limits = {facts.resource.RLIMIT_NOFILE: (256, 4096), facts.resource.RLIMIT_MEMLOCK: (-1, -1)}
    monkeypatch.setattr(facts.resource, "getrlimit", limits.get)
    assert [facts._limit(which) for which in limits] == [256, None]


def run_doctor(*launcher, **variables):
    return subprocess.run(
        [sys.executable, "-m", *launcher, "pycomm.doctor", "--json"],
        capture_output=True,
        text=True,
        env=env.for_child(OMP_NUM_THREADS=1, **variables),
    )


def test_command():
    done = run_doctor()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["usable"] and report["facts"][0]["group"]["ranks"] == 2


@tier(slow=1)
def test_command_under_torchrun():
    """All ranks are asked, rank 0 prints, and a group of all is tried."""
    done = run_doctor("torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [one["rank"] for one in report["facts"]] == [0, 1, 2]
    assert all(one["group"]["ranks"] == 3 and one["group"]["problem"] is None for one in report["facts"])


@tier(slow=1)
def test_a_wrong_variable_makes_pycomm_unusable():
    done = run_doctor(PYCOMM_CMA="perhaps")
    assert done.returncode == 1
    assert not json.loads(done.stdout)["usable"]


def test_text_is_narrow_and_says_what_to_do():
    answers = [dataclasses.replace(GOOD, max_files=64, numa={"0": [0], "1": [1]})]
    text = command.as_text(checks.judge(answers), usable=True)
    assert all(len(line) <= command.WIDTH for line in text.splitlines())
    assert "numactl" in text and text.endswith("pycomm can be used here.")


def test_what_is_found_and_what_to_do_stand_below_each_other():
    findings = [
        checks.Finding("a name", checks.State.missing, "word " * 30, "do this " * 20, fatal=True),
        checks.Finding("other", checks.State.ok, "fine"),
    ]
    lines = command.as_text(findings, usable=False).splitlines()
    assert lines[0].startswith("missing  a name            word word ")
    below = lines[1 : lines.index("ok       other             fine")]
    assert below and all(line[:27].isspace() and line[27] in "wd" for line in below)
    assert lines[-2:] == ["", "pycomm cannot be used here."]
