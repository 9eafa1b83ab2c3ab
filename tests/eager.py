"""Helpers for small messages, whose sends complete before their recvs are posted (docs/decisions/0028)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pycomm

MOST = 960  # bytes
CONFIRMED = 6  # tag of the messages below


def caught_later(comm: pycomm.Communicator, peer: int, send: Callable[[], Any]) -> pycomm.MismatchError:
    """Sends, and returns the error that the next call raises. The recv of `peer` raises too, and `peer` then
    calls confirm_to().
    """
    send()
    token, had = torch.zeros(1), False
    with pytest.raises(pycomm.MismatchError) as info:
        comm.recv(token, peer, CONFIRMED)
        had = True  # the call began before the peer's recv failed; the next one begins after that
        comm.recv(token, peer, CONFIRMED)
    if not had:
        comm.recv(token, peer, CONFIRMED)
    assert token.item() == 1
    return info.value


def confirm_to(comm: pycomm.Communicator, peer: int) -> None:
    comm.send(torch.ones(1), peer, CONFIRMED)
