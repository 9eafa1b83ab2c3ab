"""Hosts that are emulated on this one: network namespaces, each with its own boot id and host name.

    python -m pycomm.testing.emulated 2x2 --rate 1gbit -- python train.py

        host0  rank 0, rank 1   eth0 10.77.0.1 ---+
                                                  +--- bridge, in a namespace of its own
        host1  rank 2, rank 3   eth0 10.77.0.2 ---+    links of 1 Gbit/s each way

Nothing of the machine's own network is touched, and everything ends with this process, however it ends. It
needs root or user namespaces, and the programs in PROGRAMS. Where the system does not permit it the command
says why and exits with 77, and Hosts raises Unavailable.

A namespace lives as long as a process is in it. Each host has a keeper, which does nothing; ranks enter the
namespaces of its keeper. Links have a rate, and no delay: many kernels come without netem.

Tests fork ranks that have torch already:

    with Hosts("2x2") as hosts, hosts.ranks(main, limit=60) as ranks: ...
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from pycomm import env

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from types import TracebackType

    from pycomm.testing.processes import Args, Main, RankProcesses

Keeper: TypeAlias = "subprocess.Popen[str]"  # the process in the namespaces of a host, or of the switch

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname", "sh", "cat")
SKIPPED = 77  # exit status: not permitted here
KINDS = ("user", "mnt", "uts", "ipc", "net")  # of namespaces, in the order in which they are entered
MOST_HOSTS = 250
BURST, LATENCY = "1mb", "50ms"  # of the token bucket: what a link takes at once, what waits for it
FIRST_PORT = 29500
COMMAND_S = 30.0  # for a command of ip or tc
END_S = 5.0  # for ranks to end by themselves, when one has failed
POLL_S = 0.02
# what a keeper does in its new namespaces; it ends when its standard input does
KEEPER = """set -e
mount --bind "$1" /proc/sys/kernel/random/boot_id
mount --bind "$2" /etc/hosts
hostname "$3"
ip link set lo up
echo ready
exec cat >/dev/null"""


class Unavailable(RuntimeError):
    """This system does not permit emulated hosts; the text says what was refused."""


def parse_placement(text: str) -> list[int]:
    """For each rank the number of its host. Hosts are numbered by their lowest rank.

    "2x4": two hosts with four ranks each. "3+5": three ranks, then five. "0101": the host of each rank.
    Raises ValueError.
    """
    wrong = ValueError(
        f"placement {text!r}: must be like 2x4 (hosts x ranks), 3+5 (ranks of each host) or 0101 (the host "
        "of each rank, numbered in the order in which they come)"
    )
    if match := re.fullmatch(r"(\d{1,3})x(\d{1,3})", text, re.ASCII):
        sizes = [int(match[2])] * int(match[1])
    elif re.fullmatch(r"\d{1,3}(\+\d{1,3})+", text, re.ASCII):
        sizes = [int(size) for size in text.split("+")]
    elif re.fullmatch(r"0\d+", text, re.ASCII):
        hosts = [int(digit) for digit in text]
        if list(dict.fromkeys(hosts)) != list(range(max(hosts) + 1)):
            raise wrong
        return hosts
    else:
        raise wrong
    if not sizes or min(sizes) < 1 or len(sizes) > MOST_HOSTS:
        raise wrong
    return [host for host, size in enumerate(sizes) for _ in range(size)]


class Hosts:
    """Emulated hosts, as a context manager.

    Attributes:
        placement: for each rank the number of its host.
        names: of the hosts, "host0" and so on; they resolve on all of them.
        keepers: of each host.
        by_user: they are in a user namespace, not of root.
    """

    def __init__(self, placement: str, *, rate: str | None = None, ipv6: bool = False) -> None:
        """placement: see parse_placement. rate: of each link, each way, as tc writes it ("1gbit"); None: as
        fast as memory. ipv6: MASTER_ADDR is an IPv6 address; the hosts have both kinds.
        """
        self.placement, self.rate, self.ipv6 = parse_placement(placement), rate, ipv6
        self.names = [f"host{host}" for host in range(max(self.placement) + 1)]
        self.keepers: list[Keeper] = []
        self._switch: Keeper | None = None
        self._runs, self._opened = 0, contextlib.ExitStack()
        self.by_user = False

    @property
    def switch(self) -> Keeper:
        assert self._switch is not None, "the hosts are there inside the context only"
        return self._switch

    def address(self, host: int, ipv6: bool = False) -> str:
        return f"fd77::{host + 1:x}" if ipv6 else f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for keeper in (*self.keepers, *filter(None, [self._switch])):
            keeper.kill()
            keeper.wait()
            for pipe in filter(None, (keeper.stdin, keeper.stdout)):
                pipe.close()
        self.keepers, self._switch = [], None
        self._opened.close()

    # --- making them --------------------

    def _make(self) -> None:
        user = user_namespace()
        self.by_user = bool(user)
        folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="pycomm-hosts-")))
        known = ["127.0.0.1 localhost", "::1 localhost"]
        for host, name in enumerate(self.names):
            known += [f"{self.address(host)} {name}", f"{self.address(host, True)} {name}"]
        (folder / "hosts").write_text("".join(f"{line}\n" for line in known))
        self._switch = _keeper(["unshare", *user, "-n", "sh", "-c", "echo ready; exec cat >/dev/null"])
        _run(
            [*self._inside(self.switch, "-n"), "ip", "-batch", "-"], ["link add br0 type bridge", *_up("br0")]
        )
        for host, name in enumerate(self.names):
            boot = folder / name
            boot.write_text(f"{uuid.uuid4()}\n")
            into = self._inside(self.switch) if self.by_user else []
            arguments = [str(boot), str(folder / "hosts"), name]
            self.keepers.append(_keeper([*into, "unshare", "-nmui", "sh", "-c", KEEPER, "sh", *arguments]))
            self._connect(host)

    def _connect(self, host: int) -> None:
        port, keeper, switch = f"p{host}", self.keepers[host], self._inside(self.switch, "-n")
        made = f"link add {port} type veth peer name eth0 netns {keeper.pid}"
        _run([*switch, "ip", "-batch", "-"], [made, f"link set {port} master br0", *_up(port)])
        addresses = [f"addr add {self.address(host)}/24 dev eth0"]
        if os.path.exists("/proc/net/if_inet6"):
            addresses.append(f"addr add {self.address(host, True)}/64 dev eth0 nodad")
        _run([*self._inside(keeper, "-n"), "ip", "-batch", "-"], [*addresses, *_up("eth0")])
        if self.rate is not None:
            bucket = ["root", "tbf", "rate", self.rate, "burst", BURST, "latency", LATENCY]
            _run([*self._inside(keeper, "-n"), "tc", "qdisc", "add", "dev", "eth0", *bucket])
            if len(self.names) > 2:  # several may send to one
                _run([*switch, "tc", "qdisc", "add", "dev", port, *bucket])
        self._await_link(host, True)

    def _inside(self, keeper: Keeper, *kinds: str) -> list[str]:
        """The start of a command that runs in namespaces of a keeper."""
        user = ["-U", "--preserve-credentials"] if self.by_user else []
        return ["nsenter", "-t", str(keeper.pid), *user, *kinds]

    # --- using them --------------------

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set for a rank; a PYCOMM_HOST_ID of this process does not count there."""
        host = self.placement[rank]
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(self.placement[:rank].count(host)),
            "WORLD_SIZE": str(len(self.placement)),
            "LOCAL_WORLD_SIZE": str(self.placement.count(host)),
            "MASTER_ADDR": self.address(0, self.ipv6),
            "MASTER_PORT": str(FIRST_PORT + self._runs),
            "PYCOMM_HOST_ID": "",
        }

    def command(self, host: int) -> list[str]:
        """The start of a command that runs on a host."""
        return [*self._inside(self.keepers[host], "-n", "-m", "-u", "-i"), f"--wd={os.getcwd()}"]

    def switch_command(self) -> list[str]:
        """The start of a command that runs where the links meet: br0 has the ports p0, p1 and so on."""
        return self._inside(self.switch, "-n")

    @contextlib.contextmanager
    def network_of(self, host: int) -> Iterator[None]:
        """This thread has the network of a host while the context lasts, and what it opens stays there. For
        root, which the processes of apart() are.
        """
        with open("/proc/thread-self/ns/net") as mine, open(f"/proc/{self.keepers[host].pid}/ns/net") as its:
            set_namespace(its.fileno())
            try:
                yield
            finally:
                set_namespace(mine.fileno())

    def ranks(
        self, main: Main, *args: object, limit: float, ranks: Sequence[int] | None = None
    ) -> RankProcesses:
        """RankProcesses that run main(rank, link, *args), each on its host and with its environment().

        limit: seconds after which a rank ends itself. ranks: those to start; None: all.
        """
        from pycomm.testing.processes import RankProcesses  # imports torch

        self._runs += 1
        chosen = range(len(self.placement)) if ranks is None else ranks
        return RankProcesses(chosen, _on_its_host, self, main, args, limit=limit)

    def set_link(self, host: int, up: bool) -> None:
        """Takes the cable of a host out, or puts it in.

        A host asks three times, within 3 s, for a neighbour. Whoever connects after the link is back, while
        the answers to questions of before are still awaited, would be told that there is no route: forgotten.
        """
        _run([*self._inside(self.switch, "-n"), "ip", "link", "set", f"p{host}", "up" if up else "down"])
        self._await_link(host, up)
        for keeper in self.keepers if up else ():
            _run([*self._inside(keeper, "-n"), "ip", "neigh", "flush", "dev", "eth0"])

    def _await_link(self, host: int, up: bool) -> None:
        """The kernel tells the two ends of a change after a while."""
        end = time.monotonic() + COMMAND_S
        for keeper, name in ((self.switch, f"p{host}"), (self.keepers[host], "eth0")):
            while ("state UP" in _run([*self._inside(keeper, "-n"), "ip", "link", "show", name])) != up:
                if time.monotonic() > end:
                    raise Unavailable(f"the link of {self.names[host]} does not go {'up' if up else 'down'}")
                time.sleep(POLL_S)


def _on_its_host(rank: int, link: Connection, hosts: Hosts, main: Main, args: Args) -> object:
    enter(hosts.keepers[hosts.placement[rank]].pid, hosts.by_user)
    env.set_place(rank, len(hosts.placement), **hosts.environment(rank))
    return main(rank, link, *args)


def enter(keeper: int, by_user: bool = False) -> None:
    """Moves this process, which must have one thread, to the host of a keeper, for good. keeper: the number
    of its process. by_user: the hosts are not of root.
    """
    place = os.getcwd()
    with contextlib.ExitStack() as opened:
        paths = [f"/proc/{keeper}/ns/{kind}" for kind in (KINDS if by_user else KINDS[1:])]
        for namespace in [opened.enter_context(open(path)) for path in paths]:
            set_namespace(namespace.fileno())
    os.chdir(place)


def apart(command: Sequence[str]) -> NoReturn:
    """Runs a command in the place of this process, as root of namespaces of its own: all processes in them
    end with the first, and that one with this process. Raises Unavailable.
    """
    unshare = ["unshare", *user_namespace(), "-pf", "--kill-child", "--mount-proc"]
    _run([*unshare, "true"])
    os.execvp("unshare", [*unshare, *command])


def user_namespace() -> list[str]:
    """The options of unshare that give the rights to make hosts: none for root, else a user namespace. Raises
    Unavailable.
    """
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        raise Unavailable(f"there is no {', '.join(missing)}")
    for options in ([], ["-Ur"]):
        try:
            _run(["unshare", *options, "-nmui", "true"])
            return options
        except Unavailable as error:
            refused = error
    raise Unavailable(f"namespaces are not permitted here: {refused}")


def set_namespace(fd: int) -> None:
    """setns(2), which Python has from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def _up(name: str) -> list[str]:
    return [f"link set {name} up"]


def _run(command: Sequence[str], lines: Iterable[str] = ()) -> str:
    """Runs a command, with these lines as its input; what it writes. Raises Unavailable."""
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode != 0:
        name = " ".join(command[command.index("ip") :] if "ip" in command else command)
        raise Unavailable(f"{name}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def _keeper(command: Sequence[str]) -> Keeper:
    keeper = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert keeper.stdout is not None and keeper.stderr is not None  # pipes
    if keeper.stdout.readline() != "ready\n":
        _, said = keeper.communicate(timeout=COMMAND_S)
        raise Unavailable(f"a namespace could not be made: {said.strip()}")
    keeper.stderr.close()
    return keeper


# --- the command --------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command as ranks of emulated hosts. Returns the exit status: that of the first rank that failed,
    77 where hosts cannot be emulated.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    inside = arguments[:1] == ["--inside"]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = make_parser().parse_args(arguments[inside:end]), arguments[end + 1 :]
    try:
        hosts = Hosts(given.placement, rate=given.rate, ipv6=given.ipv6)
        if not command:
            raise ValueError("what each rank is to run must stand after --")
    except ValueError as error:
        make_parser().error(str(error))
    try:
        if not inside:
            apart([sys.executable, "-m", "pycomm.testing.emulated", "--inside", *arguments])
        with hosts:
            return run_everywhere(hosts, command)
    except Unavailable as error:
        print(f"skip: {error}", file=sys.stderr)
        return SKIPPED


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.testing.emulated",
        usage="%(prog)s [-h] [--rate RATE] [--ipv6] placement -- command ...",
        description="Runs a command on the ranks of several hosts, which are emulated on this one.",
        epilog=f"Exit status {SKIPPED}: the system does not permit it, and the reason is on stderr.",
    )
    forms = "2x4 (hosts x ranks), 3+5 (ranks of each host), 0101 (host of each rank)"
    parser.add_argument("placement", help=forms)
    parser.add_argument("--rate", help="of each link, each way, as tc writes it: 1gbit, 200mbit")
    parser.add_argument("--ipv6", action="store_true", help="the hosts find each other by IPv6")
    return parser


def run_everywhere(hosts: Hosts, command: Sequence[str]) -> int:
    """Runs a command on every rank. When one fails, the others are ended. Returns its exit status, or 0."""
    running: dict[int, subprocess.Popen[bytes]] = {}
    failed = 0
    threads = env.threads_of_ranks(len(hosts.placement))
    try:
        for rank, host in enumerate(hosts.placement):
            place = env.for_child(**threads, **hosts.environment(rank))
            running[rank] = subprocess.Popen([*hosts.command(host), *command], env=place)
        while running and not failed:
            time.sleep(POLL_S)
            for rank, process in list(running.items()):
                if process.poll() is not None:
                    del running[rank]
                    failed = failed or process.returncode
    finally:
        end = time.monotonic() + END_S
        for process in running.values():
            process.terminate()
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    sys.exit(main())
