"""What the controller tells a rank, as JSON."""

from typing import TypedDict

from pycomm.quantities import GlobalRank


class Spec(TypedDict, total=False):
    """address, token: of the controller. rank: of the rank that reads it. site: where the Python packages of
    an MPI are. keepers, hosts: process and name of the emulated host of each rank; None: this host. The
    others: see runner.Options.
    """

    address: tuple[str, int]
    token: str
    store: tuple[str, int]  # torch's
    backend: str
    rank: GlobalRank
    ranks: int
    groups: int
    threads: bool  # all ranks of the backend in one process
    device: str
    ranks_per_gpu: int
    registered: bool
    graph: bool
    timeout: float
    sessions: bool
    site: str | None
    keepers: list[int] | None
    hosts: list[str] | None
