"""The native API around the collectives: kinds of arrays, errors for wrong arguments, run_ranks, environment,
describe, context manager.
"""

import contextlib
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pycomm
from pycomm import arrays, env
from pycomm.testing import RankFailure, run_ranks

# --- kinds of arrays --------------------


class OnlyDLPack:
    """An array of another framework: nothing but the protocol, over memory of torch."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Namespaced(OnlyDLPack):
    """One that follows the array API: results are made by its namespace."""

    def __array_namespace__(self):
        return Namespaced

    @staticmethod
    def from_dlpack(array):
        return Namespaced(torch.from_dlpack(array))


KINDS = {
    "torch": (lambda x: x, torch.Tensor, lambda a: a),
    "numpy": (lambda x: x.numpy(), np.ndarray, torch.from_numpy),
    "namespaced": (Namespaced, Namespaced, lambda a: a.tensor),
    "dlpack": (OnlyDLPack, torch.Tensor, lambda a: a.tensor if isinstance(a, OnlyDLPack) else a),
}


def every_operation(comm, kind):
    """(name, the result has the right kind, its values); new results have the kind of the input, given ones
    are returned as they are.
    """
    n, r = comm.world_size, comm.rank
    wrap, made, unwrap = KINDS[kind]
    row = torch.arange(4.0) + 10 * r
    results = []

    def note(name, got, given=None):
        right_kind = got is given if given is not None else isinstance(got, made)
        results.append((name, right_kind, unwrap(got).tolist() if got is not None else None))

    x = wrap(row.clone())
    note("all_reduce", comm.all_reduce(x), x)
    x, out = wrap(row.clone()), wrap(torch.zeros(4))
    note("all_reduce out", comm.all_reduce(x, out=out), out)
    x = wrap(row.clone())
    note("broadcast", comm.broadcast(x, n - 1), x)
    note("all_gather", comm.all_gather(wrap(row.clone())))
    parts = [wrap(torch.zeros(4)) for _ in range(n)]
    assert comm.all_gather(wrap(row.clone()), parts) is parts
    results.append(("all_gather list", True, [unwrap(part).tolist() for part in parts]))
    note("reduce_scatter", comm.reduce_scatter(wrap(torch.stack([row] * n))))
    note("reduce_scatter list", comm.reduce_scatter([wrap(row.clone()) for _ in range(n)]))
    note("all_to_all", comm.all_to_all(wrap(torch.stack([row + p for p in range(n)]))))
    got = comm.gather(wrap(row.clone()))
    results.append(
        ("gather", isinstance(got, made) if r == 0 else got is None, unwrap(got).tolist() if r == 0 else None)
    )
    out = wrap(torch.zeros(4))
    note(
        "scatter", comm.scatter(wrap(torch.stack([row + p for p in range(n)])) if r == 0 else None, out), out
    )
    x = wrap(row.clone())
    note("async", comm.all_reduce(x, async_op=True).wait(), x)
    x = wrap(torch.zeros(4))
    work = comm.send(wrap(row.clone()), (r + 1) % n, async_op=True)
    note("recv", comm.recv(x, (r - 1) % n, async_op=True).wait(), x)
    assert work.wait() is None
    return results


def expected_results(n, r):
    rows = [torch.arange(4.0) + 10 * p for p in range(n)]
    total, stack = sum(rows).tolist(), [row.tolist() for row in rows]
    return [
        ("all_reduce", True, total),
        ("all_reduce out", True, total),
        ("broadcast", True, stack[n - 1]),
        ("all_gather", True, stack),
        ("all_gather list", True, stack),
        ("reduce_scatter", True, [total]),
        ("reduce_scatter list", True, total),
        ("all_to_all", True, [(row + r).tolist() for row in rows]),
        ("gather", True, stack if r == 0 else None),
        ("scatter", True, (rows[0] + r).tolist()),
        ("async", True, total),
        ("recv", True, stack[(r - 1) % n]),
    ]


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_kind_of_the_input(kind, mode):
    assert run_ranks(3, every_operation, kind, mode=mode) == [expected_results(3, r) for r in range(3)]


def test_arrays_are_used_in_place():
    def body(comm):
        x = np.arange(6.0).reshape(2, 3)
        view, memory = x[:, 1], torch.zeros(4)
        comm.all_reduce(view)  # strided
        comm.all_reduce(OnlyDLPack(memory.fill_(1)))
        empty = np.empty((0, 3), np.int32)
        assert comm.all_reduce(empty) is empty and comm.all_gather(empty).shape == (2, 0, 3)
        assert comm.all_gather(np.int64([comm.rank])).dtype == np.int64
        return x.tolist(), memory.tolist()

    assert run_ranks(2, body) == [([[0.0, 2.0, 2.0], [3.0, 8.0, 5.0]], [2.0] * 4)] * 2


def test_gradients_do_not_get_in_the_way():
    def body(comm):
        x = torch.ones(3, requires_grad=True)
        strided = torch.ones(3, 2, requires_grad=True)
        with torch.no_grad():
            comm.all_reduce(x)
        comm.all_reduce(strided.detach()[:, 0])
        return x.tolist(), strided[:, 0].tolist()

    assert run_ranks(2, body) == [([2.0] * 3, [2.0] * 3)] * 2


def test_arrays_of_cupy_are_used_in_its_stream(monkeypatch):
    """Not in torch's current one; also where the first of a list decides, or there is nothing to decide."""

    class Array:
        __module__ = "cupy._core.core"
        device = SimpleNamespace(id=3)

        def __dlpack__(self, **kwargs):
            return torch.ones(2).__dlpack__()

        def __dlpack_device__(self):
            return torch.ones(2).__dlpack_device__()

    entered = []
    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=77))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, from_dlpack=lambda x: ("cupy", x)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: (pointer, device))
    monkeypatch.setattr(torch.cuda, "stream", lambda of: entered.append(of) or contextlib.nullcontext())
    x, y = Array(), torch.ones(2)
    for given, used in ((x, True), ([x, y], True), ((x,), True), (y, False), ([y, x], False), ([], False)):
        entered.clear()
        assert arrays.call_in_stream(given, lambda a, b: a - b, 5, 3) == 2
        assert entered == [(77, 3)] * used
    found = arrays.call_with_tensors(lambda *given: given, "al", [x, [x, y]], ["rest"])
    assert entered == [(77, 3)] and isinstance(found[0], torch.Tensor) and found[1][1] is y
    assert found[2] == "rest" and arrays.like(y, x) == ("cupy", y)


# --- errors --------------------


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


def ones(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(*shape, dtype=dtype, device=device)


# Each call is wrong on its own rank: (operation, call, text that names what is wrong). All must raise before
# anything is sent.
WRONG = [
    ("all_reduce", lambda c: c.all_reduce(ones(2, device="meta")), "meta"),
    ("all_gather", lambda c: c.all_gather(ones(2), ones(4, device="meta")), "meta"),
    ("send", lambda c: c.send(ones(2, device="meta"), 1 - c.rank), "meta"),
    ("recv", lambda c: c.recv(ones(2, device="meta"), 1 - c.rank), "meta"),
    ("all_reduce", lambda c: c.all_reduce(torch.quantize_per_tensor(ones(2), 0.1, 0, torch.qint8)), "QInt8"),
    ("send", lambda c: c.send(torch.quantize_per_tensor(ones(2), 0.1, 0, torch.qint8), 1 - c.rank), "QInt8"),
    ("broadcast", lambda c: c.broadcast(torch.zeros(2, dtype=torch.complex32)), "ComplexHalf"),
    ("all_reduce", lambda c: c.all_reduce(ones(2).to_sparse()), "dense"),
    ("all_reduce", lambda c: c.all_reduce(ones(2, dtype=torch.complex64).conj()), "resolve_conj"),
    ("all_reduce", lambda c: c.all_reduce(ones(2), "bxor"), "bxor is not defined for dtype f32"),
    ("all_reduce", lambda c: c.all_reduce(ones(2), out=ones(3)), "3 elements, expected 2"),
    ("all_reduce", lambda c: c.all_reduce(ones(2), out=ones(2, dtype=torch.float64)), "f64"),
    ("all_reduce", lambda c: c.all_reduce(ones(2), algorithm="staged"), "staged"),
    ("reduce", lambda c: c.reduce(ones(2), 2), "root=2"),
    ("reduce", lambda c: c.reduce(ones(2), c.rank, out=ones(3)), "3 elements, expected 2"),
    ("broadcast", lambda c: c.broadcast(ones(2), -1), "root=-1"),
    ("broadcast", lambda c: c.broadcast(ones(2), algorithm="ring"), "ring"),
    ("gather", lambda c: c.gather(ones(2), root=5), "root=5"),
    ("gather", lambda c: c.gather(ones(2), ones(5), c.rank), "5 elements"),
    ("gather", lambda c: c.gather(ones(2), [ones(2)], c.rank), "list of 1"),
    ("gather", lambda c: c.gather(ones(2), [ones(2), ones(3)], c.rank), "3 elements, expected 2"),
    ("scatter", lambda c: c.scatter(ones(5), ones(2), c.rank), "5 elements"),
    ("scatter", lambda c: c.scatter([ones(2)] * 3, ones(2), c.rank), "list of 3"),
    ("scatter", lambda c: c.scatter(None, ones(2), 9), "root=9"),
    ("all_gather", lambda c: c.all_gather(ones(2), ones(5)), "5 elements"),
    ("all_gather", lambda c: c.all_gather(ones(2), [ones(2)] * 3), "list of 3"),
    ("all_gather", lambda c: c.all_gather(ones(2), [ones(7)] * 2), "7 elements"),
    ("reduce_scatter", lambda c: c.reduce_scatter(ones(3)), r"shape \(3,\)"),
    ("reduce_scatter", lambda c: c.reduce_scatter(ones(4), ones(3)), "4 elements"),
    ("reduce_scatter", lambda c: c.reduce_scatter([ones(2)] * 3), "list of 3"),
    ("reduce_scatter", lambda c: c.reduce_scatter([ones(2)] * 2, ones(3)), "3 elements"),
    ("all_to_all", lambda c: c.all_to_all(ones(3)), "3 rows"),
    ("all_to_all", lambda c: c.all_to_all(ones(4), in_splits=[1, 2], out_splits=[2, 2]), "sum to 3"),
    ("all_to_all", lambda c: c.all_to_all(ones(4), in_splits=[4], out_splits=[4]), "1 input splits"),
    (
        "all_to_all",
        lambda c: c.all_to_all(ones(4), ones(4), in_splits=[5, -1], out_splits=[2, 2]),
        "negative",
    ),
    ("all_to_all", lambda c: c.all_to_all([ones(2)] * 2, [ones(2)] * 3), "list of 3"),
]
PLAIN = [  # without rank and operation in the text: the argument alone says what is wrong
    (
        ValueError,
        lambda c: c.all_reduce(ones(2), "add"),
        "unknown reduce op 'add'; expected one of sum, avg, product",
    ),
    (ValueError, lambda c: c.all_reduce(ones(2), "premul_sum"), "premul_sum"),
    (
        ValueError,
        lambda c: c.all_reduce(ones(2), algorithm="tree"),
        "unknown algorithm 'tree'; expected None or one of",
    ),
    (ValueError, lambda c: c.all_reduce(read_only()), "read-only"),
    (ValueError, lambda c: c.all_to_all([ones(2)] * 2), "list of outputs"),
    (TypeError, lambda c: c.all_reduce([1.0, 2.0]), "got list"),
    (TypeError, lambda c: c.all_reduce(None), "got NoneType"),
    (TypeError, lambda c: c.all_reduce(3.0), "got float"),
    ((TypeError, ValueError), lambda c: c.all_reduce(np.array(["a"])), "."),
]


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:ComplexHalf:UserWarning")
def test_wrong_arguments_name_rank_and_operation():
    def body(comm):
        wrong = []
        for number, (op, call, text) in enumerate(WRONG):
            try:
                with pytest.raises(ValueError, match=rf"^\[rank {comm.rank}/2\] {op}: .*{text}"):
                    call(comm)
            except BaseException as error:
                wrong.append(f"{number} {op} ({text}): {type(error).__name__}: {str(error)[:300]}")
        for kind, call, text in PLAIN:
            with pytest.raises(kind, match=text):
                call(comm)
        return wrong, comm.all_reduce(torch.ones(2)).tolist()  # the group is as good as before

    for wrong, total in run_ranks(2, body):
        assert not wrong, "\n".join(wrong)
        assert total == [2.0, 2.0]


def test_wrong_groups():
    store = torch.distributed.HashStore()
    for rank, world_size in ((2, 2), (-1, 2), (0, 0), (0, 5000)):
        with pytest.raises(ValueError, match=str(rank if world_size != 5000 else 1024)):
            pycomm.Communicator(store, rank, world_size)
    with pytest.raises(ValueError, match="rank and world_size"):
        pycomm.Communicator(store)


# --- life, environment, facts --------------------


def test_context_manager_closes_or_aborts():
    def body(comm):
        sub = comm.split(0)
        with sub:
            sub.barrier()
        with pytest.raises(pycomm.AbortedError, match="closed"):
            sub.all_reduce(torch.ones(1))
        sub.close()  # twice is allowed
        other = comm.split(0)
        with (
            pytest.raises(RuntimeError if comm.rank == 0 else pycomm.AbortedError, match="cannot go on"),
            other,
        ):
            if comm.rank == 0:
                raise RuntimeError("cannot go on")
            other.barrier()
        assert repr(comm) == f"pycomm.Communicator(rank={comm.rank}, world_size=2, name='default')"
        return comm.all_reduce(torch.ones(1)).item()

    assert run_ranks(2, body, timeout=20) == [2.0, 2.0]


def test_algorithm_from_the_environment(monkeypatch):
    def body(comm):
        with pytest.raises(
            pycomm.MismatchError, match="algorithm=(ring here, direct|direct here, ring) on rank"
        ):
            comm.all_reduce(torch.ones(1), algorithm="direct" if comm.rank else None)
        assert comm.broadcast(torch.ones(9)).sum() == 9
        return comm.all_reduce(torch.ones(1), algorithm="two_shot").item()  # an argument wins

    monkeypatch.setenv("PYCOMM_ALGORITHM", "all_reduce=ring,broadcast=staged")
    assert run_ranks(2, body) == [2.0, 2.0]
    for value, text in (
        ("all_reduce=tree", "tree"),
        ("all_reduce=staged", "all_reduce has no algorithm staged"),
    ):
        monkeypatch.setenv("PYCOMM_ALGORITHM", value)
        with pytest.raises(RankFailure, match=f"ValueError: .*{text}"):
            run_ranks(2, lambda comm: comm.all_reduce(torch.ones(1)))


@pytest.mark.parametrize(
    ("mode", "cma", "reach"),
    [
        ("threads", "1", "pointers"),
        ("processes", "1", "process_vm_readv"),
        ("processes", "0", "staging only"),
    ],
)
def test_describe(monkeypatch, mode, cma, reach):
    monkeypatch.setenv("PYCOMM_CMA", cma)
    for r, facts in enumerate(
        run_ranks(2, lambda comm: comm.describe(), mode=mode, threads=3, staging_bytes=1 << 19, name="facts")
    ):
        assert facts["reach"].startswith(reach)
        known = {
            key: facts[key] for key in ("name", "rank", "world_size", "threads", "staging_bytes", "broken")
        }
        assert known == {
            "name": "facts",
            "rank": r,
            "world_size": 2,
            "threads": 3,
            "staging_bytes": 1 << 19,
            "broken": False,
        }
        assert facts["simd"] in ("baseline", "avx2", "avx512") and isinstance(facts["oversubscribed"], bool)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SCRIPT = """
import torch, pycomm
with pycomm.Communicator() as comm:
    x = comm.all_reduce(torch.full((3,), comm.rank + 1.0))
    print(comm.rank, comm.world_size, x.tolist())
"""


def test_group_from_the_environment_of_torchrun():
    launch = dict(WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    command = [sys.executable, "-c", SCRIPT]
    children = [
        subprocess.Popen(command, env=env.for_child(RANK=r, **launch), stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    try:
        said = [child.communicate(timeout=60)[0].strip() for child in children]
    finally:
        for child in children:
            child.kill()
    assert said == [f"{r} 2 [3.0, 3.0, 3.0]" for r in range(2)]


def test_group_of_one_from_the_environment(monkeypatch):
    for name, value in dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()).items():
        monkeypatch.setenv(name, str(value))
    with pycomm.Communicator() as comm:
        assert (comm.rank, comm.world_size, comm.all_reduce(torch.ones(2)).tolist()) == (0, 1, [1.0, 1.0])
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        pycomm.Communicator()
