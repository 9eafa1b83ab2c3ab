"""One rank raises in a step: the others get an error of the wire that has its rank and its text. Where all
raise alike nothing is broken, and nothing of it is told later.
"""

import itertools
import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from odd_models import Plain, adamw, cross, gpt, tokens
from torch_ranks import DIED, spawn

import pycomm
import pycomm.parallel as par
from pycomm.parallel.ground import comm, last_words
from pycomm.parallel.parts import parts_of


def break_forward(model):
    def hook(module, args):
        raise ArithmeticError("früh " + "x" * 5000)

    model.blocks[1].register_forward_pre_hook(hook)


def break_backward(model):
    def broken(grad):
        raise ArithmeticError("in backward")

    def hook(module, args, out):
        if out.requires_grad:
            out.register_hook(broken)

    model.blocks[1].register_forward_hook(hook)


class Case(NamedTuple):
    plan: str
    culprit: int
    how: Callable  # makes its model raise
    dies: bool  # its process ends at once, or goes on without the others
    call: Callable


def one_raises(rank, world_size, case):
    plan, culprit, how, dies, call = case
    model = gpt()
    par.parallelize(model, opt := adamw(model), par.Plan.parse(plan))
    if rank == culprit:
        how(model)
    start = time.monotonic()
    try:
        call(model, opt)
    except Exception as error:  # noqa: BLE001
        if rank == culprit and dies:
            os._exit(1)
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", 0.0


def step(model, opt):
    par.step(model, opt, tokens(0), cross, microbatches=2, clip=1.0)


def evaluate(model, opt):
    par.evaluate(model, tokens(0), cross, microbatches=2)


CASES = [
    Case("dp=2,tp=2", 3, break_forward, True, step),
    Case("dp=2,tp=2", 1, break_backward, False, step),
    Case("dp=2,pp=2,zero=3,stages=2:1", 0, break_forward, True, step),
    Case("dp=2,pp=2,zero=1,stages=1:2", 2, break_backward, True, step),
    Case("tp=2", 1, break_forward, True, evaluate),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.plan} {case.how.__name__}")
def test_the_others_name_it(case):
    """The one that raises may be rank 0, may end at once, or may go on and never come back."""
    culprit, dies, how = case.culprit, case.dies, case.how
    deaths = [culprit] if dies else []
    world_size = par.Plan.parse(case.plan).world_size
    found = spawn(world_size, one_raises, case, timeout=3.0, expect_deaths=deaths)
    text = "früh xxx" if how is break_forward else "in backward"
    for rank, result in enumerate(found):
        if rank == culprit:
            assert result == DIED if dies else text in result[1]
            continue
        kind, message, seconds = result
        assert f"Rank {culprit} had raised ArithmeticError: {text}" in message, message
        assert kind in ("PeerError", "CommTimeoutError", "MismatchError") and seconds < 30


def again(rank, world_size):
    model = gpt()
    par.parallelize(model, opt := adamw(model), par.Plan(dp=2))
    with pytest.raises(ValueError, match="a user's mistake"):
        par.step(model, opt, tokens(0), mistaken)
    loss = par.step(model, opt, tokens(0), cross).item()
    with pytest.raises(ValueError, match="a user's mistake"):
        par.step(model, opt, tokens(0), mistaken)
    if rank == 1:
        os._exit(0)
    with pytest.raises(pycomm.CommError) as caught:
        par.step(model, opt, tokens(0), cross)
    return loss, str(caught.value), parts_of(model).last_words.memory is not None


def mistaken(out, y):
    raise ValueError("a user's mistake")


def test_errors_of_all_ranks_break_nothing():
    (loss, message, shared), died = spawn(2, again, expect_deaths=[1])
    assert died == DIED and loss > 0 and shared
    assert message.endswith("Rank 1 had raised ValueError: a user's mistake")


def forgotten(rank, world_size):
    """What was raised in a step is forgotten with the next one."""
    model = Plain()
    par.parallelize(model, opt := adamw(model), par.Plan(dp=2))
    with pytest.raises(ValueError, match="a user's mistake"):
        par.step(model, opt, tokens(0), mistaken)
    if rank == 1:
        model.norm.register_forward_pre_hook(lambda *_: os._exit(0))
    with pytest.raises(pycomm.CommError) as caught:
        par.step(model, opt, tokens(0), cross)
    return str(caught.value)


def test_what_was_raised_is_forgotten_with_the_next_step():
    message, died = spawn(2, forgotten, expect_deaths=[1])
    assert died == DIED and "rank 1 died" in message and "had raised" not in message


def one_rank_alone(rank, world_size):
    model = gpt()
    par.parallelize(model, opt := adamw(model), par.Plan())
    with pytest.raises(ValueError, match="a user's mistake"):
        par.step(model, opt, tokens(0), mistaken)
    return torch.isfinite(par.step(model, opt, tokens(0), cross)).item()


def test_one_rank_alone():
    assert spawn(1, one_rank_alone) == [True]


def late(rank, world_size):
    if rank == 1:
        original = last_words._map

        def late_map(*args):
            time.sleep(1)
            return original(*args)

        last_words._map = late_map
    model = gpt()
    par.parallelize(model, opt := adamw(model), par.Plan(dp=2))
    if rank == 0:
        break_forward(model)
    try:
        step(model, opt)
    except Exception as error:  # noqa: BLE001
        if rank == 0:
            os._exit(1)
        return str(error)


def test_a_rank_that_ends_before_the_other_has_looked():
    """Its memory is open in both from the end of parallelize on."""
    assert "Rank 0 had raised ArithmeticError" in spawn(2, late, expect_deaths=[0])[1]


def slots(size):
    """LastWords of several ranks in the memory of one process."""
    memory, found = mmap.mmap(-1, last_words.TOKEN + last_words.SLOT * size), []
    for rank in range(size):
        words = last_words.LastWords.__new__(last_words.LastWords)
        words.memory, words.group, words.mesh = memory, comm.Group("world", size, rank, None), None
        found.append(words)
        words.leave(None)
    return found


def test_each_rank_has_room_of_its_own():
    """Long texts, cut in the middle of a letter, one after the other, in any order, and short ones after."""
    ranks, most = slots(3), last_words.SLOT - last_words.LENGTH.size
    for order, length in itertools.product(((0, 1, 2), (2, 1, 0), (1, 0, 2)), (5000, 999, 1008, 3, 0)):
        texts = [f"ValueError: {rank}{'ü' * length}" for rank in range(3)]
        for rank in order:
            ranks[rank].leave(ValueError(texts[rank].removeprefix("ValueError: ")))
        left = [text.encode()[:most].decode(errors="replace") for text in texts]
        said = [f"Rank {rank} had raised {text}" for rank, text in enumerate(left)]
        for rank, reader in enumerate(ranks):
            assert reader.of_others() == [text for other, text in enumerate(said) if other != rank]
    ranks[1].leave(None)
    assert [len(reader.of_others()) for reader in ranks] == [1, 2, 1]
    with ranks[0].told():  # begins without own words
        assert [len(reader.of_others()) for reader in ranks] == [1, 1, 0]
    with pytest.raises(KeyboardInterrupt), ranks[2].told():
        raise KeyboardInterrupt("enough")
    assert ranks[0].of_others() == ["Rank 2 had raised KeyboardInterrupt: enough"]


def test_who_waits_for_whom_is_followed_to_its_end():
    """From the rank that an error names to the one that it waited for, and so on; never in a circle."""
    ranks = slots(5)
    for rank, about in ((1, 4), (4, 2), (3, 0)):
        ranks[rank]._leave(f"waits for {about}", about)
    ranks[2].leave(ValueError("the cause"))
    assert ranks[0]._chain(1, False) == [
        *("Rank 1 had raised waits for 4", "Rank 4 had raised waits for 2"),
    ]
    assert ranks[0].of_others() == ["Rank 2 had raised ValueError: the cause"]
    ranks[2]._leave("waits for 1", 1)
    assert len(ranks[0]._chain(1, False)) == 3 and ranks[0].of_others() == []
    assert ranks[4]._chain(-1, True) == [] and ranks[3]._chain(0, False) == []


def test_an_error_of_the_wire_that_names_nobody_stays_as_it_is():
    """And is not left for the others; of a MismatchError all ranks have one."""
    ranks = slots(2)
    for error in (pycomm.CommError("no memory"), pycomm.MismatchError("sizes differ")):
        error.peer = 1
        with pytest.raises(type(error)) as caught, ranks[0].told():
            raise error
        assert str(caught.value) in ("no memory", "sizes differ")
        assert ranks[1].of_others() == [] == ranks[1]._chain(0, False)
