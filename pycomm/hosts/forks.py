"""Keeps Gloo's sockets from the children of this process.

The other hosts see that a rank is dead when its connections end, and they end with the last process that has
them. A child that a rank has forked (a worker of a DataLoader) lives on for a while. Gloo opens its sockets
without FD_CLOEXEC and knows no forks. So pycomm finds them when the ranks are connected; from then on exec
closes them, and os.fork() does in the child.

Which sockets are Gloo's is known from the addresses that it publishes in the store, a sockaddr each among
other bytes, of its listening socket:

    rank 0   listens at A  <--------------  connects to A      rank 1, which has read A in the store
             accepted: local address A      peer address A

What can go wrong: a library forks without exec and without Python; its child keeps the sockets, and the death
of its parent is only silence. Another version of Gloo publishes something else: the same.
"""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from typing import Any

__all__ = ["keep_from_children"]

_KEPT: dict[int, int] = {}  # fd -> inode of its socket, by which a number that was given anew is told from it


def keep_from_children(own: list[bytes], others: list[bytes]) -> None:
    """own: what Gloo has published of this rank; others: what the other ranks have."""
    sockets = _sockets()
    for fd in [fd for fd, inode in _KEPT.items() if sockets.get(fd) != inode]:
        del _KEPT[fd]  # Gloo has closed it
    for fd, inode in sockets.items():
        with contextlib.suppress(OSError):  # closed meanwhile
            local, peer = _addresses(fd)
            if any(local in one for one in own) or (peer and any(peer in one for one in others)):
                fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.fcntl(fd, fcntl.F_GETFD) | fcntl.FD_CLOEXEC)
                _KEPT[fd] = inode


def _sockets() -> dict[int, int]:
    """The inodes of this process' sockets, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _addresses(fd: int) -> tuple[bytes, bytes | None]:
    """The sockaddr of both ends of a TCP socket, as they are in memory. Raises OSError."""
    with socket.socket(fileno=os.dup(fd)) as one:
        if one.type != socket.SOCK_STREAM:
            raise OSError
        local, peer = _packed(one.family, one.getsockname()), None
        with contextlib.suppress(OSError):
            peer = _packed(one.family, one.getpeername())
    return local, peer


def _packed(family: int, address: tuple[Any, ...]) -> bytes:
    """address: as socket has it, (IP, port) or (IP, port, flow, scope)."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        raise OSError
    port = struct.pack("=H", family) + struct.pack("!H", address[1])
    flow = struct.pack("!I", address[2]) if family == socket.AF_INET6 else b""
    return port + flow + socket.inet_pton(family, address[0].partition("%")[0])


def _after_fork() -> None:
    """In the child. The numbers stay taken: what the child has of Gloo's objects may still close them."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, inode in _KEPT.items():
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _KEPT.clear()


os.register_at_fork(after_in_child=_after_fork)
