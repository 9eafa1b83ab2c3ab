"""The counters of all groups of this process as a Prometheus endpoint, by Prometheus's own client for Python.

Off unless PYCOMM_METRICS_PORT is set. It listens on localhost only: who wants the figures elsewhere puts his
scraper, or a proxy that asks who comes, beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pycomm import _C, env
from pycomm.counters import statistics_of

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily

__all__ = ["collect", "serve_if_asked", "watch"]

Sample: TypeAlias = tuple[tuple[str, str, str, str], float]  # labels, value


class Watched(NamedTuple):
    """A group that is counted in."""

    name: str
    rank: int
    counters: _C.WatchedCounters


_groups: list[Watched] = []
_served: dict[int, bool] = {}  # pid -> whether this process serves them

_FIELDS = (
    ("operations", "operations that have completed"),
    ("bytes", "bytes of the whole buffers"),
    ("waiting_s", "seconds from a rank's arrival to that of the last"),
    ("moving_s", "seconds from the arrival of the last rank to the end"),
)


def watch(comm: _C.Communicator, name: str) -> None:
    """Counts a group in, while it lives."""
    serve_if_asked()
    if _served[os.getpid()]:
        _groups.append(Watched(name, comm.rank, _C.WatchedCounters(comm)))


def serve_if_asked() -> None:
    if os.getpid() in _served:
        return
    _served[os.getpid()] = False
    _groups.clear()
    port = env.metrics_port()
    if port is None:
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        env.logger().warning(
            "PYCOMM_METRICS_PORT is set, but prometheus_client is not installed (pip install "
            "prometheus-client): no metrics are served"
        )
        return
    registry = CollectorRegistry()
    registry.register(_Collector())
    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        env.logger().warning("PYCOMM_METRICS_PORT: port %d: %s; no metrics are served", port, error)
        return
    _C.measure(True)
    _served[os.getpid()] = True


def collect() -> Iterator[tuple[str, str, list[Sample]]]:
    """(field, help, samples) of each counter."""
    rows = []
    for group in list(_groups):
        name, rank, watched = group
        counters = watched.get()
        if counters is None:
            with contextlib.suppress(ValueError):  # another scrape has removed it meanwhile
                _groups.remove(group)
            continue
        for operation, sizes in statistics_of(counters).items():
            for size, values in sizes.items():
                rows.append(((name, str(rank), operation, size), values))
    for field, meaning in _FIELDS:
        yield field, meaning, [(labels, values[field]) for labels, values in rows]


class _Collector:
    def collect(self) -> Iterator[CounterMetricFamily]:
        from prometheus_client.core import CounterMetricFamily

        for field, meaning, samples in collect():
            name = "pycomm_" + field.removesuffix("_s") + ("_seconds" if field.endswith("_s") else "")
            family = CounterMetricFamily(name, meaning, labels=["group", "rank", "operation", "size"])
            for labels, value in samples:
                family.add_metric(labels, value)
            yield family
