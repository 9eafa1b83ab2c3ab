"""Makes torch's ProcessGroupNCCL for the CUDA tensors of a group that spans hosts (csrc/torch/nccl_side.h).

It is made by the first operation on a CUDA tensor, in a thread of its own: connecting, it waits for all ranks
and cannot be called away. Should it hang, the thread is left behind, and the operation raises.

NCCL's own handling of errors ends the process (torch's TORCH_NCCL_ASYNC_ERROR_HANDLING), as does its limit.
The first is switched off here, the second is years: what goes wrong is seen by pycomm, which aborts NCCL.
"""

from __future__ import annotations

import datetime
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from pycomm import env
from pycomm.hosts.meeting import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import ProcessGroupNCCL

LIMIT_S = 1e8  # NCCL's own limit of an operation; pycomm's are shorter
COUNTERS = ("came", "made")


class Request(NamedTuple):
    """What the extension asks for: store to timeout as of engines()."""

    store: dist.Store
    rank: int
    hosts: Sequence[int]
    labels: Sequence[str]
    token: str
    timeout: float
    device: int  # index of this rank's
    look: Callable[[], object]  # is called now and then, may raise


def nccl(*fields: Any) -> ProcessGroupNCCL:
    """Over all ranks of a group, for CUDA tensors; fields of a Request. Collective.

    Raises RuntimeError or TimeoutError. What one rank fails with, all raise; the others add who has seen it.
    """
    request = Request(*fields)
    store = dist.PrefixStore(f"pycomm.hosts/{request.token}/nccl", request.store)
    meeting = Meeting(store, request.rank, request.hosts, request.labels, request.timeout)
    meeting.watch = request.look
    try:
        made = _meet_and_make(meeting, request.store, request.token, request.device)
    except BaseException as error:
        problem = meeting.fail(error)
        if problem is error:
            raise
        raise problem from None
    meeting.leave(COUNTERS)
    return made


def _meet_and_make(meeting: Meeting, store: dist.Store, token: str, device: int) -> ProcessGroupNCCL:
    meeting.arrive("came")
    maker = _Maker(dist.PrefixStore(f"pycomm.nccl/{token}", store), meeting, torch.device("cuda", device))
    meeting.hurry()
    maker.start()
    while maker.is_alive():
        meeting.pause()
        if meeting.late():
            raise TimeoutError(f"NCCL has not connected all ranks within {meeting.timeout:g} s.")
    if maker.made is None:
        raise RuntimeError(f"NCCL could not connect the ranks: {maker.error}")
    meeting.arrive("made")
    meeting.wait_for_all("made", meeting.world_size, "The NCCL of the other ranks was not made")
    return maker.made


class _Maker(threading.Thread):
    """`made` or `error` is set at its end."""

    def __init__(self, store: dist.Store, meeting: Meeting, device: torch.device) -> None:
        super().__init__(name="pycomm NCCL", daemon=True)
        self.store, self.meeting, self.device = store, meeting, device
        self.made: ProcessGroupNCCL | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            made = process_group(self.store, self.meeting.rank, self.meeting.world_size)
            made.eager_connect_single_device(self.device)  # else the first operation connects
            self.made = made
        except Exception as error:
            self.error = error


def process_group(store: dist.Store, rank: int, world_size: int) -> ProcessGroupNCCL:
    """torch's NCCL over these ranks; not connected yet. Raises RuntimeError where there is none."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise RuntimeError(
            "this torch was built without NCCL (it has no torch.distributed.ProcessGroupNCCL), which moves "
            "CUDA tensors between hosts."
        )
    options = kind.Options()
    options._timeout = datetime.timedelta(seconds=LIMIT_S)
    with env.nccl_spares_the_process():
        return kind(store, rank, world_size, options)
