"""The ports at which pycomm itself listens, on one interface each; PYCOMM_PORT_RANGE limits them.

Gloo and NCCL choose their own ports, whatever the variable says. UCX has UCX_TCP_PORT_RANGE.
SECURITY.md lists all ports of a job.
"""

import errno
import random
import socket

import torch.distributed as dist

from pycomm import env

__all__ = ["listen", "make_store"]

BACKLOG = 1024


def listen(ip: str) -> socket.socket:
    """A socket that listens on an address, at a port of PYCOMM_PORT_RANGE or at one that the system chooses.
    Raises RuntimeError.
    """
    allowed = env.port_range()
    if allowed is None:
        free = _listen_at(ip, 0)
        assert free is not None  # the system has chosen the port
        return free
    low, high = allowed
    first = random.randint(low, high)  # ranks that begin together try different ones
    for port in (*range(first, high + 1), *range(low, first)):
        if (listening := _listen_at(ip, port)) is not None:
            return listening
    raise RuntimeError(
        f"Cannot listen on {ip}: all ports of PYCOMM_PORT_RANGE={low}-{high} are in use. Allow more: each "
        "rank of a host needs one for each group over hosts, and one more while a group is made."
    )


def _listen_at(ip: str, port: int) -> socket.socket | None:
    """None: the port is in use."""
    listening = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:  # connections that have ended keep a port for a minute
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ip, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if port and error.errno == errno.EADDRINUSE:
            return None
        where = f"{ip} at port {port}" if port else ip
        raise RuntimeError(f"Cannot listen on {where}: {error}.") from None
    listening.setblocking(False)
    return listening


def make_store(ip: str) -> dist.TCPStore:
    """A TCPStore in this process, which listens on this address only; torch's own way is all interfaces."""
    listening = listen(ip)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
