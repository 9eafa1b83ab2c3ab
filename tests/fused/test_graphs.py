"""How the benchmarks and gpu-check make graphs where ranks are threads on one GPU, on a model of the driver:
the first replay of a graph that is not on the device yet waits for the kernels that run, and a kernel waits
for those of the other ranks.
"""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from pycomm.benchmarks.common import device

RANKS, SECONDS = 2, 20


class Driver:
    """Kernels of one collective: each ends when all ranks have one."""

    def __init__(self):
        self.changed, self.launched, self.uploaded, self.stuck = threading.Condition(), 0, set(), []

    def upload(self, graph, _stream):
        with self.changed:
            self.uploaded.add(graph.value)
        return 0

    def launch(self, graph):
        with self.changed:
            running = lambda: 0 < self.launched < RANKS  # noqa: E731
            if graph not in self.uploaded and running():
                self.stuck.append(graph)  # nobody else comes before this one has its place
            self.uploaded.add(graph)
            self.launched += 1
            self.changed.notify_all()


def graphs_of(driver, shown):
    class Graph:
        numbers = iter(range(1, 100))

        def __init__(self):
            self.number = next(self.numbers)

        def capture_begin(self, capture_error_mode):
            assert capture_error_mode == "thread_local"

        def capture_end(self):
            pass

        def replay(self):
            driver.launch(self.number)

        if shown:

            def raw_cuda_graph_exec(self):
                return self.number

    return Graph


def replay_everywhere(monkeypatch, shown):
    """The graphs whose first replay waited for a kernel that waited for it."""
    driver = Driver()
    stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graphs_of(driver, shown))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuGraphUpload=driver.upload))
    on_host, failed = threading.Barrier(RANKS, timeout=SECONDS), []

    def rank():
        try:
            graph = device.capture(lambda: None, 1)
            on_host.wait()
            graph.replay()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=rank) for _ in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failed and driver.launched == RANKS
    return driver.stuck


def test_a_first_replay_waits_for_no_kernel(monkeypatch):
    assert replay_everywhere(monkeypatch, shown=True) == []


def test_the_model_shows_it(monkeypatch):
    assert len(replay_everywhere(monkeypatch, shown=False)) == 1


def test_a_failed_upload_is_raised(monkeypatch):
    driver = Driver()
    driver.upload = lambda graph, stream: 2
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graphs_of(driver, True))
    stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuGraphUpload=driver.upload))
    with pytest.raises(RuntimeError, match="cuGraphUpload failed: error 2"):
        device.capture(lambda: None, 1)
