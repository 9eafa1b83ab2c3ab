"""The counters of all groups of this process as a Prometheus endpoint, by Prometheus's own client for Python.

Off unless PYCOMM_METRICS_PORT is set. It listens on localhost only: who wants the figures elsewhere puts his
scraper, or a proxy that asks who comes, beside it.
"""

import os

from pycomm import _C, env
from pycomm.observed import statistics_of

__all__ = ["collect", "serve_if_asked", "watch"]

_groups = []  # (name, rank, WatchedCounters)
_served = {}  # pid -> whether this process serves them

_FIELDS = (
    ("operations", "operations that have completed"),
    ("bytes", "bytes of the whole buffers"),
    ("waiting_s", "seconds from a rank's arrival to that of the last"),
    ("moving_s", "seconds from the arrival of the last rank to the end"),
)


def watch(comm, name):
    """Counts a group in, while it lives."""
    serve_if_asked()
    if _served[os.getpid()]:
        _groups.append((name, comm.rank, _C.WatchedCounters(comm)))


def serve_if_asked():
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


def collect():
    """(field, help, [(labels, value)]) of each counter."""
    rows = []
    for group in list(_groups):
        name, rank, watched = group
        counters = watched.get()
        if counters is None:
            _groups.remove(group)
            continue
        for operation, sizes in statistics_of(counters).items():
            for size, values in sizes.items():
                rows.append(((name, str(rank), operation, size), values))
    for field, meaning in _FIELDS:
        yield field, meaning, [(labels, values[field]) for labels, values in rows]


class _Collector:
    def collect(self):
        from prometheus_client.core import CounterMetricFamily

        for field, meaning, samples in collect():
            name = "pycomm_" + field.removesuffix("_s") + ("_seconds" if field.endswith("_s") else "")
            family = CounterMetricFamily(name, meaning, labels=["group", "rank", "operation", "size"])
            for labels, value in samples:
                family.add_metric(labels, value)
            yield family
