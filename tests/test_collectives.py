"""Every collective x algorithm x world size x ugly count x placement of buffers, against one-line oracles on
all ranks' inputs (collective_cases.py).
"""

import mmap
import random

import pytest
import torch
from collective_cases import ALGORITHMS, CHECKS, DTYPES, MOVING, PLACEMENTS, check, f32, run_cases, same
from tiers import tier

import pycomm
from pycomm.testing import run_ranks

# --- the table --------------------

KIB = 1024
CONFIGS = {  # name -> (world sizes, environment, options of run_ranks)
    "threads": ([1, 2, 3, 4, 7], {}, {}),
    "threads-small-staging": ([2, 3, 7], {}, {"staging_bytes": 256 * KIB}),
    "threads-2-lanes": ([2, 4], {}, {"staging_bytes": 256 * KIB, "threads": 2}),
    "threads-4-lanes": ([3], {}, {"threads": 4}),
    "processes": ([1, 2, 3, 4], {}, {"mode": "processes"}),
    "processes-small-staging": ([2, 7], {}, {"mode": "processes", "staging_bytes": 256 * KIB}),
    "processes-4-lanes": ([2], {}, {"mode": "processes", "threads": 4}),
    "processes-no-cma": ([2, 3], {"PYCOMM_CMA": "0"}, {"mode": "processes", "staging_bytes": 256 * KIB}),
}


def small_counts(n):
    """Around nothing, the world size, the 40 bytes of the header's line and its payload of 8192 bytes, whole
    and per rank.
    """
    edges = {0, 1, n - 1, n, n + 1, 9, 10, 11, 17} | {
        edge + d for edge in (8192 // 4, 8192 // 4 // n) for d in (-1, 0, 1)
    }
    return sorted(edges | {40 // 4 // n, 40 // 4 // n + 1, 4099})


def large_counts(n, options):
    """Beyond two steps of every pipeline; with 256 KiB blocks (all staging, cores enough) around one and two
    blocks, whole and per rank.
    """
    if "staging_bytes" in options:
        return [20011, 93001]
    if n > 2:
        return [20011]
    return (
        [edge + d for edge in (65536 // n, 65536, 131072) for d in (-1, 1)]
        + [200003]
        + [400009] * (options.get("threads", 1) > 1)
    )


def table(name, n, options):
    """Small counts in all placements; large ones in one placement each, which differs from case to case."""
    seed = 0
    for algorithm in ALGORITHMS[name]:
        for count in [0, 1, 11, 1009] if "staging_bytes" in options else small_counts(n):
            seed += 1
            for placement in sorted({"dense", list(PLACEMENTS)[seed % 4]}):
                yield name, count, placement, seed, {"algorithm": algorithm}
        for count in large_counts(n, options):
            seed += 1
            yield name, count, list(PLACEMENTS)[seed % 4], seed, {"algorithm": algorithm}


@tier(quick=1 / 20, slow=1 / 2)
@pytest.mark.parametrize(
    ("config", "n"), [(config, n) for config, (sizes, _, _) in CONFIGS.items() for n in sizes]
)
def test_table(monkeypatch, config, n):
    _, environment, options = CONFIGS[config]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    check(n, [case for name in CHECKS for case in table(name, n, options)], **options)


@tier(quick=1 / 2)
@pytest.mark.parametrize(("mode", "n"), [("threads", 3), ("processes", 2)])
def test_every_dtype_is_moved_bit_by_bit(mode, n):
    cases, sizes = [], [0, 1, 7, 1031, 9001]
    for name in MOVING:
        for i, algorithm in enumerate(ALGORITHMS[name]):
            for j, dtype in enumerate(DTYPES.values()):
                options = {"algorithm": algorithm, "dtype": dtype}
                cases.append((name, sizes[(i + j) % 5], list(PLACEMENTS)[(i + j) % 4], i * 20 + j, options))
    check(n, cases, mode=mode)


def program(seed, n, length):
    """Operations of alternating kinds, algorithms, sizes and placements: what one leaves in flags and staging
    must not disturb the next.
    """
    rng = random.Random(seed)
    for step in range(length):
        name = rng.choice(list(CHECKS))
        count = rng.choice([0, 1, n, 9, 11, 500, 2047, 2049, 5003, 12007, rng.randrange(40000)])
        yield (
            name,
            count,
            rng.choice(list(PLACEMENTS)),
            seed * length + step,
            {"algorithm": rng.choice(ALGORITHMS[name])},
        )


PROGRAMS = [
    "threads-2",
    "threads-small-staging-4",
    "processes-4-lanes-2",
    "processes-small-staging-3",
]  # configuration and world size


@tier(quick=1 / 4)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("where", PROGRAMS)
def test_random_programs(where, seed):
    config, _, n = where.rpartition("-")
    check(int(n), list(program(seed, int(n), 60)), **CONFIGS[config][2])


@tier(slow=1)
def test_sixteen_processes():
    cases = [
        (name, count, "dense", 7, {"algorithm": algorithm})
        for name in CHECKS
        for algorithm in ALGORITHMS[name]
        for count in (3, 5003)
    ]
    check(16, cases, mode="processes", staging_bytes=1 << 20)


TWO_LANES = 262_209  # elements: csrc/collectives/call.cc


def every_route(counts, names=CHECKS):
    return [
        (name, count, list(PLACEMENTS)[i % 2], i, {"algorithm": algorithm})
        for name in names
        for i, (algorithm, count) in enumerate((a, count) for a in ALGORITHMS[name] for count in counts)
    ]


@pytest.mark.parametrize("mode", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_every_algorithm_on_two_lanes(mode):
    check(2, every_route([TWO_LANES]), mode=mode, threads=2)


@pytest.mark.parametrize("config", [config for config in CONFIGS if "lanes" not in config])
def test_every_algorithm_on_every_route(monkeypatch, config):
    """A few sizes of each: within the header, beyond the payload, and of more steps than one."""
    _, environment, options = CONFIGS[config]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    check(3, every_route([1, 2100, 20011]), **options)


@pytest.mark.parametrize("threads", [[1, 3, 2], [3, 2, 1]], ids=str)
def test_the_smallest_number_of_threads_counts(threads):
    """The ranks ask for different numbers of threads."""
    store, cases = torch.distributed.HashStore(), every_route([TWO_LANES], ["all_reduce", "broadcast"])

    def body(comm):
        with pycomm.Communicator(store, comm.rank, 3, threads=threads[comm.rank]) as group:
            return run_cases(group, cases)

    assert sum(run_ranks(3, body, timeout=45), []) == []


# --- what went wrong once --------------------


def lopsided(comm, size):
    n, r = comm.world_size, comm.rank
    sizes = torch.zeros(n, n, dtype=torch.int64)
    sizes[0, 1] = sizes[1, 0] = size
    sizes[0, 2] = 10
    parts = [[torch.full((sizes[q, p],), 10.0 * q + p) for p in range(n)] for q in range(n)]
    got = comm.all_to_all(
        torch.cat(parts[r]), in_splits=sizes[r].tolist(), out_splits=sizes[:, r].tolist(), timeout=5
    )
    return same(got, torch.cat([parts[q][r] for q in range(n)]))


@tier(quick=1 / 4)
@pytest.mark.parametrize("size", [1000, 30000, 100000, 700000])
@pytest.mark.parametrize("cma", ["0", "1"])
def test_all_to_all_whose_ranks_see_very_different_sizes(monkeypatch, cma, size):
    """All ranks must choose the same algorithm, although each knows only its own sizes."""
    monkeypatch.setenv("PYCOMM_CMA", cma)
    assert run_ranks(3, lopsided, size, mode="processes", timeout=8, staging_bytes=256 * KIB) == [True] * 3


def stale(comm):
    """Peers must not take what a mismatched operation has left in the staging. Pages of rank 0's data are
    absent: it is slow.
    """
    count, wrong = 700000, 0
    for _ in range(25):
        with pytest.raises(pycomm.MismatchError):
            comm.broadcast(torch.full((count + comm.rank,), -1.0), algorithm="staged")
        x = (
            torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=f32)
            if comm.rank == 0
            else torch.full((count,), -5.0)
        )
        comm.barrier()
        wrong += int(comm.broadcast(x, algorithm="staged").any())
    return wrong


def test_a_mismatch_leaves_nothing_behind():
    assert run_ranks(3, stale, mode="processes") == [0, 0, 0]
