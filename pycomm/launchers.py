"""Who this process is, from the variables that launchers set for each rank.

    launcher    rank, ranks                                  rank on the host
    torchrun    RANK WORLD_SIZE                              LOCAL_RANK
    Open MPI    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK
    MPICH,      PMI_RANK PMI_SIZE                            MPI_LOCALRANKID, PMI_LOCAL_RANK
    Intel MPI
    Slurm       SLURM_PROCID SLURM_NTASKS, in a step         SLURM_LOCALID

The first one in this list that is there counts, as launchers start each other from the bottom to the top:
srun starts torchrun once per host, mpiexec runs inside of a Slurm job. MPI launchers that disagree are
refused, and one that disagrees with tasks of Slurm that cannot be its own helpers.

Where rank 0 is:

    MASTER_ADDR, MASTER_PORT    where they are set
    all ranks on one host       127.0.0.1
    Slurm                       the first host of the step, or of the job for an MPI launcher inside of it
    Open MPI                    the host of mpirun
    else                        a ValueError says what to set

Rank 0 checks that it is there. The port comes from the number of the job. Nothing here reads the environment;
pycomm/env.py passes it in.
"""

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# below the ports that systems give to connections
FIRST_PORT, PORTS = 20000, 12000
PROXY = "hydra_pmi_proxy"  # of MPICH and Intel MPI: the ancestor of all ranks of a host
# a name, with numbers in brackets anywhere in it: rack[1-2]-node[08-11,14]
_NAME, _NUMBERS = r"[\w.\-]+", r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*"
PIECE = re.compile(rf"({_NAME})|\[({_NUMBERS})\]", re.ASCII)
HOST = re.compile(rf"(?:{_NAME}|\[{_NUMBERS}\])+", re.ASCII)
HOST_LIST = re.compile(rf"{HOST.pattern}(?:,{HOST.pattern})*", re.ASCII)


class Launcher(NamedTuple):
    """The variables of a launcher; several names: the first that is set."""

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    how: str  # to pass a variable to all ranks


OPEN_MPI = Launcher(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    "mpirun -x MASTER_ADDR=node-a -x MASTER_PORT=29500",
)
HYDRA = Launcher(
    "MPICH or Intel MPI",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    "mpiexec -genv MASTER_ADDR node-a -genv MASTER_PORT 29500",
)
SLURM = Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), (), "export MASTER_ADDR=node-a")
LAUNCHERS = (OPEN_MPI, HYDRA, SLURM)


class Place(NamedTuple):
    """What a launcher says of this rank."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_size: int | None  # None: it does not say

    def __str__(self) -> str:
        names = self.launcher.rank, self.launcher.world_size
        return f"{names[0]}={self.rank} and {names[1]}={self.world_size} ({self.launcher.name})"


def find_place(variables: Mapping[str, str]) -> Place | None:
    """The Place that Open MPI, MPICH, Intel MPI or Slurm have given to this process, or None. variables: the
    environment. Raises ValueError where they are wrong or disagree.
    """
    places = [place for place in (_place(launcher, variables) for launcher in LAUNCHERS) if place]
    for other in places[1:]:
        same = other[1:3] == places[0][1:3]
        if not same and not (other.launcher is SLURM and _one_task_per_host(variables)):
            raise ValueError(
                f"Two launchers have set variables that disagree: {places[0]}, {other}. Set RANK, "
                "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or unset those that are left from "
                "elsewhere."
            )
    return places[0] if places else None


def find_launch(variables: Mapping[str, str]) -> tuple[int, int, int, str, int] | None:
    """The fields of this process's env.Launch, found without RANK and WORLD_SIZE; None where no launcher is
    known. Raises ValueError.
    """
    place = find_place(variables)
    if place is None:
        return None
    address = variables.get("MASTER_ADDR", "").strip()
    if not address:
        address = _address(place, variables)
        if place.rank == 0 and not is_here(address):
            text = f"MASTER_ADDR is not set; {place.launcher.name} leads to {address!r}, but rank 0 is on"
            raise ValueError(f"{text} {socket.gethostname()!r}. {_advice(place)}")
    text = variables.get("MASTER_PORT", "").strip()
    port = _number("MASTER_PORT", text, 1, 65535) if text else _port(place, variables)
    return place.rank, place.world_size, place.local_rank, address, port


def _place(launcher: Launcher, variables: Mapping[str, str]) -> Place | None:
    own, all_of_them = variables.get(launcher.rank, ""), variables.get(launcher.world_size, "")
    if launcher is SLURM and not _slurm_step(variables):
        return None  # the script of a batch job has the variables, and is not one of several
    if not own or not all_of_them:
        return None
    world_size = _number(launcher.world_size, all_of_them, 1)
    rank = _number(launcher.rank, own, 0, world_size - 1)
    local_rank = _first(launcher.local_rank, variables, 0)
    return Place(
        launcher,
        rank,
        world_size,
        rank if local_rank is None else local_rank,
        _first(launcher.local_size, variables, 1),
    )


def _first(names: tuple[str, ...], variables: Mapping[str, str], low: int) -> int | None:
    return next((_number(name, variables[name], low) for name in names if variables.get(name)), None)


def _number(name: str, value: str, low: int, high: int | None = None) -> int:
    fits = re.fullmatch(r"\d{1,18}", value.strip(), re.ASCII) and low <= int(value)
    if not fits or (high is not None and int(value) > high):
        allowed = f"{low} or more" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r} in the environment: must be a whole number, {allowed}.")
    return int(value)


def _slurm_step(variables: Mapping[str, str]) -> str | None:
    """Slurm's number of the step that srun has started, None outside of one."""
    return variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or None


def _one_task_per_host(variables: Mapping[str, str]) -> bool:
    """The tasks of this step of Slurm may be another launcher's helpers on each host, or that launcher."""
    tasks = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS")
    hosts = variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES")
    return tasks is not None and tasks in (hosts, "1")


# --- where rank 0 is --------------------


def _address(place: Place, variables: Mapping[str, str]) -> str:
    hosts = variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES")
    if place.local_size == place.world_size or (place.launcher is SLURM and hosts == "1"):
        return "127.0.0.1"
    names = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"]
    if place.launcher is SLURM:
        names.insert(0, "SLURM_STEP_NODELIST")
    found = next((variables[name] for name in names if variables.get(name)), None)
    if found:
        return expand(found)[0]
    started = re.match(r"prterun-(.+)-\d+@\d+$", variables.get("PMIX_NAMESPACE", ""))
    if place.launcher is OPEN_MPI and started:
        return started[1]
    # of Open MPI before 5: "123.0;tcp://10.0.0.6,10.1.0.6:43210"
    contact = re.search(r"tcp://([^,:;]+)", variables.get("OMPI_MCA_orte_hnp_uri", ""))
    if place.launcher is OPEN_MPI and contact:
        return contact[1]
    text = f"MASTER_ADDR is not set, and {place.launcher.name} does not say where rank 0 is."
    raise ValueError(f"{text} {_advice(place)}")


def _advice(place: Place) -> str:
    return f"Set it for all ranks, for instance by `{place.launcher.how}`."


def is_here(host: str) -> bool:
    """Whether a host's name or address is this machine's."""
    if host.split(".")[0] == socket.gethostname().split(".")[0]:
        return True
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
                return True
    return False


def expand(text: str) -> list[str]:
    """Slurm's lists of hosts: "node[01-03,7],gpu5" as ["node01", "node02", "node03", "node7", "gpu5"]. Raises
    ValueError.
    """
    wrong = ValueError(f"{text!r} is not a list of hosts as Slurm writes them.")
    if not HOST_LIST.fullmatch(text.strip()):
        raise wrong
    hosts: list[str] = []
    for name in HOST.findall(text.strip()):
        made = [""]
        for plain, numbers in PIECE.findall(name):
            inside = [one for part in numbers.split(",") for one in _range(part, wrong)] if numbers else [""]
            made = [f"{start}{plain}{number}" for start in made for number in inside]
        hosts += made
    return hosts


def _range(part: str, wrong: ValueError) -> list[str]:
    """ "08-11" as ["08", "09", "10", "11"]."""
    first, _, last = part.partition("-")
    if last and int(first) > int(last):
        raise wrong
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


# --- its port --------------------


def _port(place: Place, variables: Mapping[str, str]) -> int:
    """The same on all ranks of a job, and most likely another one in each job."""
    job = variables.get("SLURM_JOB_ID") or variables.get("SLURM_JOBID")
    if job and _slurm_step(variables):
        job = f"{job}.{_slurm_step(variables)}"
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "I_MPI_HYDRA_UUID")
    mine = next((variables[name] for name in names if variables.get(name)), None)
    if mine is None and place.local_size == place.world_size:
        mine = _proxy()
    if place.launcher is not SLURM and mine:
        job = mine
    if job is None:
        text = f"MASTER_PORT is not set, and {place.launcher.name} does not number its jobs."
        raise ValueError(f"{text} {_advice(place)}")
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _proxy() -> str | None:
    """The process of mpiexec above this one, as its number and the time of its start; None without one."""
    process = os.getpid()
    while process > 1:
        try:
            name, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        except OSError:
            return None
        fields = rest.split()  # from the third one, the state
        if name.partition("(")[2] == PROXY[:15]:
            return f"{process} {fields[19]}"
        process = int(fields[1])
    return None
