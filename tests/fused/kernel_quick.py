"""A little of all kernels, and special values, for the quick tests; kernel_cases.py runs it."""

import torch
from kernel_jobs import (
    DENSE,
    GATHER,
    GATHERS,
    REDUCE,
    REDUCES,
    SCATTER,
    SCATTERS,
    TILE,
    Job,
    check,
    context_of,
    piece,
)
from oracle import ACTIVATIONS

from pycomm.fused.config import Config

SHOT = TILE._replace(one_shot=True)
FEW = [
    GATHERS[1]._replace(n=20),
    GATHERS[3]._replace(n=40, dtype=torch.bfloat16, save=True),
    SCATTERS[1]._replace(n=20),
    SCATTERS[4]._replace(dtype=torch.float16),
    REDUCES[1]._replace(n=35, sizes=lambda n: (17,), seed=1),
    REDUCES[3]._replace(n=40, dtype=torch.bfloat16, config=SHOT),
]
FEW_ALONE = [
    Job("matmul", n=33, k=9, a="strided", b="strided", activation="relu"),
    Job("matmul", n=97, k=17, sizes=lambda n: (98,), config=Config(32, 32, 16, group_m=2), save=False),
    Job("matmul", k=72, a="columns", b="rows", config=DENSE, activation="swiglu", dtype=torch.bfloat16),
]


def few(rank, world_size):
    """Every operation on one context, some again in later launches and with more programs; then another cut
    with the same sizes.
    """
    for job in FEW_ALONE[rank::world_size]:
        check(job, 1, 0)
    for job in FEW:
        check(job, world_size, rank)
    context_of().programs = 5
    again = [job._replace(seed=job.seed + 1000, n=9) for job in (FEW[4], FEW[2])]
    again.append(GATHERS[3]._replace(n=9, outer=1, inner=1, keep=True))
    for job in again:
        check(job, world_size, rank)
    launches, (epoch, ended, failed, _) = context_of().launches, context_of().block.local.tolist()
    assert launches == len(FEW) + len(again) and epoch <= launches and ended == failed == 0


SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e-40, 3e38, -3e38, 88.0, -104.0]


def special_values(rank, world_size):
    """A NaN, an infinity, the smallest and the largest numbers, in a row each, are in that row of the result
    alone; the rows are contiguous, and K is not a multiple of the tile.
    """
    from pycomm.fused import launch

    x = torch.full((len(SPECIAL), 33), 0.0)
    x[:, 0] = torch.tensor(SPECIAL)
    one = torch.zeros(33, 40)
    one[0] = 1.0
    for activation in [name for name in ACTIVATIONS if name != "swiglu"][rank::world_size]:
        job = Job("matmul", n=40, k=33, sizes=lambda n: (len(SPECIAL),), bias=False, activation=activation)
        out, z = launch.matmul(job.problem(1, 0), x, one, None, TILE._replace(block_k=16), save=True)
        wanted = ACTIVATIONS[activation](x[:, :1].double()).float().expand(-1, 40)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert z is None or torch.equal(z.nan_to_num(7.0), x[:, :1].expand(-1, 40).nan_to_num(7.0))
    rows = 35 * world_size
    for op, config in (
        (GATHER, TILE),
        (SCATTER, TILE),
        (REDUCE, TILE),
        (REDUCE, TILE._replace(one_shot=True)),
    ):
        job = Job(op, n=9, k=33, sizes=lambda n: (35,) * n, bias=False, config=config._replace(block_k=16))
        bad = [0, 31, 33, 36, rows - 1]  # the first and the last of a tile, of a rank, of all
        whole = torch.ones(rows, 33)
        whole[bad] = float("nan")
        mine = whole if rank == world_size - 1 or op == GATHER else torch.ones(rows, 33)
        mine = piece(job, world_size, rank, mine) if op == GATHER else mine
        out = getattr(launch, op)(
            job.problem(world_size, rank), context_of(), mine, torch.ones(33, 9), None, job.config
        )[0]
        first = 35 * rank if op == SCATTER else 0
        found = [first + row for row in out.isnan().all(1).nonzero().flatten().tolist()]
        assert found == [row for row in bad if first <= row < first + len(out)], f"{job}: NaN in rows {found}"
        assert (out[~out.isnan()] == 33 * (1 if op == GATHER else world_size)).all()
        assert out.isnan().sum() == 9 * len(found)


QUICK = {body.__name__: body for body in (few, special_values)}
