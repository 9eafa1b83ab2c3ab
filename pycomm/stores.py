"""TCPStores of torch that ranks open for each other while a job runs."""

import contextlib
import datetime
import socket

import torch.distributed as dist

__all__ = ["open_store", "store_at"]

LIMIT_S = 10.0  # for a store that is there


def open_store(host):
    """A new one in this process; `host`: the address by which others reach it. Its `port` is free before."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def store_at(host, port):
    """A client of one that is there. Raises OSError where it has gone: TCPStore itself would try for
    minutes.
    """
    with contextlib.closing(socket.create_connection((host, port), LIMIT_S)):
        pass
    limit = datetime.timedelta(seconds=LIMIT_S)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
