"""Small messages, whose send is over before its recv has come (docs/decisions/0028)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pycomm

MOST = 960  # bytes
SAID = 6  # tag of the messages below


def caught_later(comm: pycomm.Communicator, peer: int, send: Callable[[], Any]) -> pycomm.MismatchError:
    """The error of a send that is over before `peer` has raised its own and called said_to(): in the next
    call, which does nothing else.
    """
    send()
    token, had = torch.zeros(1), False
    with pytest.raises(pycomm.MismatchError) as info:
        comm.recv(token, peer, SAID)
        had = True  # it had begun before the peer's recv; what was sent behind that is here now
        comm.recv(token, peer, SAID)
    if not had:
        comm.recv(token, peer, SAID)
    assert token.item() == 1
    return info.value


def said_to(comm: pycomm.Communicator, peer: int) -> None:
    comm.send(torch.ones(1), peer, SAID)
