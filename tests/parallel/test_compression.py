"""pycomm.parallel.data.compression: sums against the exact sum, error feedback, bytes, equal bits on all
ranks.
"""

import pytest
import torch
from tiers import tier
from torch_ranks import data, spawn

from pycomm.parallel.data import make_compression
from pycomm.parallel.data.compression import (
    CHUNK,
    Cast,
    Compression,
    Int8,
    PowerSGD,
    TopK,
    dequantise,
    finite,
    quantise,
)
from pycomm.parallel.ground import comm

KINDS = {
    "fp16": {},
    "bf16": {},
    "bf16 with feedback": {"error_feedback": True},
    "int8": {},
    "powersgd": {"rank": 2},
    "topk": {"ratio": 0.1},
}
SHAPES = [
    (24, 20),
    (7,),
    (6, 5, 8),
    (1, 3),
    (2, 2),
    (33, 40),
]  # the last ones are followed by elements that no view covers
SIZES = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


def bucket(shapes=SHAPES, padding=3, dtype=torch.float32):
    """A flat tensor with the views into it; a vector lies before the first matrix and padding after
    the last.
    """
    flat = torch.zeros(2 + sum(torch.Size(shape).numel() for shape in shapes) + padding, dtype=dtype)
    views, at = [], 2
    for shape in shapes:
        count = torch.Size(shape).numel()
        views.append(flat[at : at + count].view(shape))
        at += count
    return flat, views


def gradient(rank, count, step=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(97 * rank + step)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def make(name, **more):
    return make_compression(name.split()[0], **{**KINDS[name], **more})()


def body_all(rank, world_size, backend):
    group = comm.as_group()
    results = {}
    for name in KINDS:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            flat, views = bucket(dtype=dtype)
            compression = make(name)
            for step in range(3):
                flat.copy_(gradient(rank, flat.numel(), step, dtype))
                compression.reduce(flat, group, views)
            results[name, dtype] = flat
        for size in SIZES:
            flat = gradient(rank, size)
            make(name).reduce(flat, group, [flat])
            results[name, size] = flat
    return results


@pytest.mark.parametrize(
    "world_size, backend", [(1, "pycomm"), (2, "pycomm"), (3, "pycomm"), (4, "pycomm"), (3, "gloo")]
)
def test_equal_bits_on_all_ranks_and_near_the_sum(world_size, backend):
    results = spawn(world_size, body_all, backend, backend=backend)
    for key, first in results[0].items():
        name, case = key
        for result in results[1:]:
            assert torch.equal(result[key], first) and result[key].dtype == first.dtype, key
        if isinstance(case, int) and name != "topk":  # a vector: nothing is of low rank, so near means near
            exact = sum(gradient(rank, case) for rank in range(world_size))
            scale = max(gradient(rank, case).abs().max().item() for rank in range(world_size))
            assert (first - exact).abs().max() <= (0 if world_size == 1 else 0.02 * world_size * scale), key
    if world_size == 1:
        for (_, case), value in results[0].items():
            assert torch.equal(
                value, gradient(0, value.numel(), 0 if isinstance(case, int) else 2, value.dtype)
            )


def body_exact(rank, world_size):
    group = comm.as_group()
    found = {}
    for name, compression in {
        "fp16": make("fp16"),
        "bf16": make("bf16"),
        "topk": TopK(ratio=1.0),
        "int8": Int8(),
        "powersgd rank 3": PowerSGD(rank=3),
        "powersgd full": PowerSGD(rank=100, min_ratio=0),
        "powersgd vectors": PowerSGD(rank=1),
    }.items():
        flat, views = bucket(SHAPES if name != "powersgd vectors" else [(7,), (2, 2), (50,)])
        flat.copy_(data(rank, flat.numel()))  # whole numbers up to 8: sums are exact in 16 bits
        if name == "powersgd rank 3":  # matrices whose columns lie in one space of 3 dimensions
            for number, view in enumerate(views):
                matrix = view.view(view.shape[0], -1)
                matrix.copy_(data(100 + number, matrix.shape[0], 3) @ data(rank, 3, matrix.shape[1]))
        if (
            name == "int8"
            # at each step some element is 127, so the scale is 1 and values are kept; sums are then multiples
            # of world_size
        ):
            flat.copy_(data(0, flat.numel()))
            flat[::CHUNK] = 127
        before = flat.clone()
        compression.reduce(flat, group, views)
        comm.all_reduce(before, group)
        found[name] = ((flat - before).abs().max() / before.abs().max()).item()
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_where_nothing_is_lost(world_size):
    for found in spawn(world_size, body_exact):
        for name, error in found.items():
            exact = name in ("fp16", "bf16", "topk", "powersgd vectors")
            assert error <= (0 if exact else 1e-5), f"{name}: {error}"


STEPS = 40


def body_constant(rank, world_size, error_feedback):
    group = comm.as_group()
    found = {}
    for name in KINDS:
        flat, views = bucket(dtype=torch.float64)
        constant = gradient(rank, flat.numel(), dtype=torch.float64)
        if isinstance(make(name), Cast) and rank:
            constant.zero_()  # the all-reduce's own rounding is then none
        exact = constant.clone()
        comm.all_reduce(exact, group)
        compression, total, errors = make(name, error_feedback=error_feedback), torch.zeros_like(flat), []
        for step in range(1, STEPS + 1):
            flat.copy_(constant)
            compression.reduce(flat, group, views)
            total += flat
            if step in (STEPS // 4, STEPS):
                errors.append(((total / step - exact).norm() / exact.norm()).item())
        found[name] = errors
    return found


def test_feedback_makes_the_mean_converge():
    with_feedback, without = spawn(3, body_constant, True)[0], spawn(3, body_constant, False)[0]
    for name, (early, late) in with_feedback.items():
        # The error of the sum over time is bounded, so that of the mean falls as 1/steps, here to 1/4; low
        # rank is slower.
        assert late < (0.4 if name == "powersgd" else 0.3) * early, f"{name}: {early} -> {late}"
        assert late < 0.25 * without[name][1], f"{name}: {late} with, {without[name][1]} without feedback"
        assert without[name][1] > 0.99 * without[name][0], f"{name} without feedback: {without[name]}"


def body_again(rank, world_size):
    group = comm.as_group()
    found = {}
    for name in ("fp16", "bf16", "int8", "topk"):
        flat, views = bucket(dtype=torch.float64)
        compression, sums = make(name, error_feedback=False), []
        for _ in range(3):
            flat.copy_(gradient(rank, flat.numel(), dtype=torch.float64))
            compression.reduce(flat, group, views)
            sums.append(flat.clone())
        found[name] = [torch.equal(each, sums[0]) for each in sums]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_without_feedback_each_sum_stands_for_itself(world_size):
    """The same gradients give the same bits, whatever was summed before."""
    for found in spawn(world_size, body_again):
        assert all(map(all, found.values())), found


# name, options; loss after training, relative to training with exact sums: at most with feedback, at least
# without
TRAININGS = [
    ("topk", {"ratio": 0.1}, 1 + 1e-4, 1.2),
    ("powersgd", {"rank": 1}, 1 + 1e-4, 1.2),
    ("int8", {}, 1 + 2e-7, 1 + 5e-6),
]


def train(rank, world_size, name, options):
    """The loss of a least-squares problem after training, rows dealt to ranks; the step size falls, so that
    feedback can settle.
    """
    group = comm.as_group()
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(60, 12, generator=generator, dtype=torch.float64)
    b = a @ torch.randn(12, 10, generator=generator, dtype=torch.float64) + torch.randn(
        60, 10, generator=generator, dtype=torch.float64
    )
    weight = torch.zeros(12, 10, dtype=torch.float64)
    mine = slice(rank, None, world_size)
    compression = make_compression(name, **options)() if name else None
    for step in range(200):
        grad = a[mine].T @ (a[mine] @ weight - b[mine]) / 60
        if compression is None:
            comm.all_reduce(grad, group)
        else:
            compression.reduce(grad.view(-1), group, [grad])
        weight -= 0.1 / (1 + step / 40) * grad
    return (a @ weight - b).square().sum().item()


def body_train(rank, world_size):
    both = []
    for name, options, _, _ in TRAININGS:
        both.append(
            [
                train(rank, world_size, name, {**options, "error_feedback": feedback})
                for feedback in (True, False)
            ]
        )
    return train(rank, world_size, None, {}), both


@tier(slow=1)
def test_training_reaches_the_same_loss_with_feedback_only():
    exact, both = spawn(3, body_train)[0]
    for (name, options, most, least), (with_feedback, without) in zip(TRAININGS, both, strict=True):
        assert with_feedback < exact * most, f"{name} {options}: {with_feedback / exact - 1:.2e}"
        assert without > exact * least, f"{name} {options} without feedback: {without / exact - 1:.2e}"


def body_bytes(rank, world_size):
    group = comm.as_group()
    found = {}
    for name in KINDS:
        flat, views = bucket([(64, 96), (64,), (30, 4, 8)], padding=0)
        flat = flat if name != "int8" else torch.zeros(4 * world_size * CHUNK)
        with comm.count_traffic() as traffic:
            make(name).reduce(flat, group, views if name != "int8" else [flat])
        found[name] = [flat.numel(), traffic.nbytes()] + [(call.op, call.nbytes) for call in traffic.log]
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes(world_size):
    n = world_size
    for found in spawn(world_size, body_bytes):
        count = found["fp16"][0]
        for name in ("fp16", "bf16", "bf16 with feedback"):
            assert found[name][1:] == [
                2 * (n - 1) * 2 * count // n,
                ("all_reduce", 2 * (n - 1) * 2 * count // n),
            ], name
        elements, total, *calls = found["int8"]
        each = (n - 1) * elements * (CHUNK + 4) // (n * CHUNK)
        assert total == 2 * each and calls == [("all_to_all", each), ("all_gather", each)]
        rest, p, q = 2 + 64, (64 + 30) * 2, (96 + 32) * 2
        assert found["powersgd"][2:] == [
            ("all_reduce", 2 * (n - 1) * 4 * size // n) for size in (rest + p, q)
        ]
        assert found["topk"][2:] == [("all_gather", (n - 1) * round(0.1 * count) * 8)]


def body_not_finite(rank, world_size):
    group = comm.as_group()
    found = {}
    for name in KINDS:
        for bad in (float("inf"), float("nan")):
            flat, views = bucket()
            compression, seen = make(name), []
            for step in range(3):
                flat.copy_(gradient(rank, flat.numel(), step))
                if step == 1 and rank == 1:
                    views[0][3, 4] = bad
                compression.reduce(flat, group, views)
                seen.append((bool(flat.isfinite().all()), bool(views[0][3, 4].isfinite())))
            found[name, bad] = seen
    overflow = torch.full((3,), 40000.0)
    make("fp16").reduce(overflow, group, [overflow])
    return found, bool(overflow.isinf().all())


def test_inf_and_nan_stay_visible_and_do_no_lasting_harm():
    for found, overflow in spawn(2, body_not_finite):
        assert overflow
        for key, seen in found.items():
            assert seen == [(True, True), (False, False), (True, True)], key


def body_zero(rank, world_size):
    """PowerSGD after a gradient of zeros: the warm start must not stay at zero."""
    flat = torch.zeros(12 * 10)
    compression = PowerSGD(rank=1)
    compression.reduce(flat, comm.as_group(), [flat.view(12, 10)])
    flat.copy_(torch.outer(torch.arange(12.0) + 1, torch.arange(10.0) + 1).view(-1))
    exact = 2 * flat
    for _ in range(6):
        flat.copy_(exact / 2)
        compression.reduce(flat, comm.as_group(), [flat.view(12, 10)])
    return ((flat - exact).norm() / exact.norm()).item()


def body_state(rank, world_size):
    group = comm.as_group()
    factory = make_compression("topk", ratio=0.5)
    one, other = factory(), factory()
    flat = torch.tensor([4.0, 1.0])
    one.reduce(flat, group, [flat])
    assert flat.tolist() == [8, 0] and one.error.tolist() == [0, 1] and other.error is None
    with pytest.raises(ValueError, match=rf"rank {rank}/2.*bucket of 2, got 3"):
        one.reduce(torch.zeros(3), group, [])
    with pytest.raises(ValueError, match=rf"rank {rank}/2.*no contiguous view"):
        PowerSGD().reduce(torch.zeros(6), group, [torch.zeros(2, 3)])
    copied = make_compression(PowerSGD(rank=3))
    assert copied() is not copied() and copied().rank == 3
    empty = torch.zeros(0)
    for name in KINDS:
        make(name).reduce(empty, group, [empty])


def test_state_and_choices():
    assert max(spawn(2, body_zero)) < 1e-5
    spawn(2, body_state)
    assert make_compression(Int8) is Int8
    assert isinstance(make_compression("bf16")(), Cast) and isinstance(
        make_compression("int8")(), Compression
    )
    for kind, options, message in [
        ("int4", {}, "choose from fp16"),
        ("topk", {"ratio": 0}, "0 < ratio"),
        ("powersgd", {"rank": 0}, "rank >= 1"),
        ("int8", {"ratio": 1}, "does not take"),
        (TopK, {"ratio": 1}, "go with a name"),
        (7, {}, "neither a name"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_compression(kind, **options)


def test_a_row_of_8_bits():
    """Each element is off by a half of a 127th of the largest of its row, at most; whatever the size."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, CHUNK, generator=generator, dtype=torch.float64)
    rows *= torch.tensor([1.0, 1e-30, 1e30, 1e-3, 0.0, 5.0, 1.0], dtype=torch.float64)[:, None]
    rows[5] = 0.0
    rows[5, 17] = -3.0
    for dtype in (torch.float64, torch.float32):
        given = rows.to(dtype)
        sent = quantise(given)
        assert sent.dtype == torch.int8 and sent.shape == (7, CHUNK + 4)
        found = dequantise(sent, dtype)
        largest = given.abs().amax(1, keepdim=True)
        assert found.dtype == dtype and ((found - given).abs() <= largest / 254 * (1 + 1e-5)).all()
        assert torch.equal(found[4], torch.zeros(CHUNK, dtype=dtype)) and found[5].count_nonzero() == 1
        assert (found.abs().amax(1) >= 0.999 * largest[:, 0]).all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = rows.float()
        spoiled[0, 3] = bad
        found = dequantise(quantise(spoiled), torch.float32)
        assert found[0].isnan().all() and not found[1:].isnan().any()
    assert finite(torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])).tolist() == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
