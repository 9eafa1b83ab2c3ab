"""Launchers: a table of what they set and who a process then is."""

import os
import re
import socket
import subprocess
import sys

import pytest
from tiers import tier

from pycomm import env, launchers
from pycomm.env import Launch
from pycomm.launchers import FIRST_PORT, PORTS, expand, find_launch

HERE = socket.gethostname()
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_JOB_NODELIST": "node[01-04]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-a-20149@1",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "I_MPI_HYDRA_UUID": "ab4e0000-7d42-17f0",
}
OLD_OPEN_MPI = {
    **OPEN_MPI,
    "PMIX_NAMESPACE": "",
    "OMPI_MCA_orte_hnp_uri": "123.0;tcp://10.0.0.6,10.1.0.6:4321",
    "OMPI_MCA_ess_base_jobid": "123",
}
MASTER = {"MASTER_ADDR": "node-b", "MASTER_PORT": "29500"}
ONE_HOST = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
DAEMONS = {**SLURM, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}  # mpirun's, one for each host


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (SLURM, (3, 4, 1, "node01")),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, (3, 4, 1, "node01")),
        ({**SLURM, "SLURM_NNODES": "1"}, (3, 4, 1, "127.0.0.1")),
        ({**SLURM, "SLURM_STEP_ID": ""}, None),  # the script of a batch job: one process
        ({**SLURM, **MASTER}, (3, 4, 1, "node-b", 29500)),
        ({**SLURM, "MASTER_PORT": "29500"}, (3, 4, 1, "node01", 29500)),
        (OPEN_MPI, (3, 4, 1, "node-a")),
        (OLD_OPEN_MPI, (3, 4, 1, "10.0.0.6")),
        ({**OPEN_MPI, **ONE_HOST}, (3, 4, 1, "127.0.0.1")),
        ({**OPEN_MPI, **MASTER}, (3, 4, 1, "node-b", 29500)),
        (HYDRA, (3, 4, 1, "127.0.0.1")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", **MASTER}, (1, 2, 1, "node-b", 29500)),
        # an MPI launcher inside of a job of Slurm
        ({**DAEMONS, **OPEN_MPI}, (3, 4, 1, "node01")),
        ({**DAEMONS, **HYDRA, "MPI_LOCALNRANKS": "2"}, (3, 4, 1, "node01")),
        # the first rank of the second host
        ({**SLURM, "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, (2, 4, 0, "node01")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, (2, 4, 0, "node-a")),
        ({**HYDRA, "PMI_RANK": "2", "MPI_LOCALRANKID": "0"}, (2, 4, 0, "127.0.0.1")),
        ({"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_LOCAL_RANK": "0", **MASTER}, (2, 3, 0, "node-b", 29500)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", **MASTER}, (0, 1, 0, "node-b", 29500)),
        # srun --mpi=pmi2 sets both
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 1, "node01")),
    ],
)
def test_launch(variables, expected):
    found = find_launch(variables)
    if expected is None:
        assert found is None
        return
    assert found[: len(expected)] == expected
    assert found[4] == 29500 or FIRST_PORT <= found[4] < FIRST_PORT + PORTS


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({**OPEN_MPI, **HYDRA, "PMI_SIZE": "5"}, r"OMPI_COMM_WORLD_RANK=3 .* PMI_RANK=3 and PMI_SIZE=5"),
        ({**SLURM, **OPEN_MPI, "SLURM_PROCID": "2"}, "Two launchers .* SLURM_PROCID=2 and SLURM_NTASKS=4"),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID='4' in the environment: .* from 0 to 3"),
        ({**HYDRA, "PMI_SIZE": "many"}, "PMI_SIZE='many' in the environment: .* 1 or more"),
        ({**HYDRA, "MPI_LOCALRANKID": "-1"}, "MPI_LOCALRANKID='-1' in the environment: .* 0 or more"),
        (
            {**HYDRA, "MPI_LOCALNRANKS": "2"},
            "Intel MPI does not say where rank 0 is. .*-genv MASTER_",
        ),
        ({**HYDRA, "MASTER_PORT": "0"}, "MASTER_PORT='0' in the environment: .* from 1 to 65535"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a"},
            "MASTER_PORT is not set, and MPICH or",
        ),
        (
            {**OPEN_MPI, "PMIX_NAMESPACE": "x"},
            "Open MPI does not say where rank 0 is. .*mpirun -x MASTER",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}, "leads to 'node-a', but rank 0 is on"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[1"}, "'node.1' is not a list of hosts"),
    ],
)
def test_wrong(variables, text):
    with pytest.raises(ValueError, match=text):
        find_launch(variables)


def test_rank_0_is_where_it_should_be():
    here = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": f"prterun-{HERE}-1@1"}
    assert find_launch(here)[3] == HERE
    assert launchers.is_here("127.0.0.1") and launchers.is_here(f"{HERE}.cluster")
    assert not launchers.is_here("192.0.2.1") and not launchers.is_here("node-a.invalid")


def test_ports_are_of_jobs():
    first, again = find_launch(SLURM), find_launch({**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"})
    assert first[4] == again[4]
    for other in ({"SLURM_JOB_ID": "1235"}, {"SLURM_STEP_ID": "1"}):
        assert find_launch({**SLURM, **other})[4] != first[4]
    inside = {**DAEMONS, **OPEN_MPI}  # two runs of mpirun in one job of Slurm
    ports = {
        find_launch({**inside, "PMIX_NAMESPACE": f"prterun-node-a-{number}@1"})[4] for number in range(9)
    }
    assert len(ports) == 9
    assert find_launch({**inside, "OMPI_COMM_WORLD_RANK": "1"})[4] == find_launch(inside)[4]


def test_jobs_of_mpiexec_are_told_apart_by_its_process(monkeypatch, tmp_path):
    """The number and the start of the proxy above this process; names may have brackets and spaces."""

    def write(process, name, parent, start):
        fields = ["S", str(parent), *"0" * 17, str(start), "0"]
        (tmp_path / str(process)).mkdir(exist_ok=True)
        (tmp_path / str(process) / "stat").write_text(f"{process} ({name}) {' '.join(fields)}\n")

    write(os.getpid(), "python) S 1 (", 300, 5)
    write(300, "sh", 200, 6)
    write(200, "hydra_pmi_proxy", 100, 4321)
    write(100, "hydra_pmi_proxy", 1, 99)
    monkeypatch.setattr(launchers, "Path", lambda name: tmp_path / name.removeprefix("/proc/"))
    assert launchers._proxy() == "200 4321"
    variables = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    first = find_launch(variables)
    write(200, "hydra_pmi_proxy", 100, 4322)
    assert first[3] == "127.0.0.1" and find_launch(variables)[4] != first[4]
    write(300, "mpiexec", 1, 6)
    assert launchers._proxy() is None
    with pytest.raises(ValueError, match="MASTER_PORT is not set, and MPICH or Intel MPI does not number"):
        find_launch(variables)
    write(300, "sh", 400, 6)  # a process that has ended
    assert launchers._proxy() is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", ["node7"]),
        ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("a[099-101]", ["a099", "a100", "a101"]),
        ("rack[1-2]-n[1,3],b", ["rack1-n1", "rack1-n3", "rack2-n1", "rack2-n3", "b"]),
        ("n[1-2]-ib.cluster", ["n1-ib.cluster", "n2-ib.cluster"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1-", "a]1", "a[2-1]", "a[x-y]", ",", "a[]b["])
def test_wrong_lists_of_hosts(text):
    with pytest.raises(ValueError, match="hosts as Slurm writes them"):
        expand(text)


@pytest.fixture
def clean(monkeypatch):
    for name in list(os.environ):
        if re.match(r"(SLURM|OMPI|PMI|PMIX|MPI|HYDRA|MASTER|I_MPI)_|(LOCAL_)?RANK$|WORLD_SIZE$", name):
            monkeypatch.delenv(name)
    # so that what is set meanwhile is removed
    for name in env.LAUNCH:
        monkeypatch.setenv(name, "")
    return monkeypatch


def test_the_environment(clean):
    assert not env.launched() and env.is_first_rank() and not env.launched_by_others()
    with pytest.raises(ValueError, match="WORLD_SIZE is not set in the environment. Start with torchrun"):
        env.launch()
    for name, value in HYDRA.items():
        clean.setenv(name, value)
    assert env.launched() and env.launched_by_others() and not env.is_first_rank()
    assert env.launch() == Launch(3, 4, 1, "127.0.0.1", env.launch().master_port)
    # what torchrun sets comes first
    for name, value in {**MASTER, "RANK": "0", "WORLD_SIZE": "2"}.items():
        clean.setenv(name, value)
    assert env.launched() and not env.launched_by_others() and env.is_first_rank()
    assert env.launch() == Launch(0, 2, 0, "node-b", 29500)


def test_the_variables_of_torchrun_are_filled_in(clean):
    for name, value in {**SLURM, "MASTER_PORT": "29501"}.items():
        clean.setenv(name, value)
    assert env.set_launch() == Launch(3, 4, 1, "node01", 29501)
    assert [os.environ[name] for name in env.LAUNCH] == ["3", "4", "1", "node01", "29501"]


PROGRAM = """
import sys, torch, torch.distributed as dist
from pycomm import _autoload
_autoload.register()
x = torch.ones(3)
if sys.argv[1] == "torch":
    dist.init_process_group("pycomm")
    dist.all_reduce(x)
    rank = dist.get_rank()
    dist.destroy_process_group()
else:
    import pycomm
    with pycomm.Communicator() as comm:
        comm.all_reduce(x)
        rank = comm.rank
print("rank", rank, "sum", int(x.sum()))
"""
STARTED = {
    "srun": lambda rank: {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
    "mpirun": lambda rank: {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "mpiexec": lambda rank: {**HYDRA, "PMI_SIZE": "2", "PMI_RANK": rank, "MPI_LOCALNRANKS": "2"},
}


@tier(quick=1 / 6)
@pytest.mark.parametrize("launcher", STARTED)
@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_program_needs_no_setting(clean, launcher, kind):
    """The very variables of a launcher, for two processes on this host."""
    job = f"{os.getpid()} {launcher} {kind}"  # a port that no other test has
    numbered = {"SLURM_JOB_ID": job, "PMIX_NAMESPACE": job, "I_MPI_HYDRA_UUID": job, "SLURM_NNODES": "1"}
    ranks = []
    try:
        for rank in "01":
            variables = {**numbered, **STARTED[launcher](rank), **numbered, **dict.fromkeys(env.LAUNCH)}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, kind],
                    env=env.for_child(**variables, OMP_NUM_THREADS=1),
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        said = [process.communicate(timeout=100)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert said == ["rank 0 sum 6\n", "rank 1 sum 6\n"]
