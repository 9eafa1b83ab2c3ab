"""The checks change no training of a family: three steps with and without them are equal in every bit, under
a plan of each axis. All families are tried, under every plan that docs/models.md has as equal: what it has as
refused is refused here too, with and without checks, and the page says why.
"""

import copy
import random

import pytest
import torch
from compare import AXES, batches, make, optimizer
from families import FAMILIES
from left_behind import differences, state_of
from table import documented
from tiers import tier
from torch_ranks import spawn
from vision import have_vision

import pycomm.parallel as par
from pycomm.parallel.ground.answers import Answers

PLANS = [*AXES, "dp=1"]


def trained(name, text):
    """What three steps leave, or the sentence of a refusal."""
    family = FAMILIES[name]
    model, opt = make(name), None
    torch.manual_seed(1)
    random.seed(1)
    opt = optimizer(model)
    try:
        model, opt = par.parallelize(model, opt, text + (f",blocks={family.blocks}" if family.blocks else ""))
        losses = [
            par.step(model, opt, copy.copy(batch), family.loss, microbatches=family.microbatches).item()
            for batch in batches(name)
        ]
    except ValueError as error:
        return str(error)
    return state_of(model, losses)


def compared(rank, world_size, name, texts):
    """{plan: places that differ, what the checks said}. A plan that is refused either way is left out."""
    found = {}
    for text in texts:
        outcomes = []
        for Answers.asks in (True, False):
            outcomes.append(trained(name, text))
            if isinstance(outcomes[0], str):
                break
        if not isinstance(outcomes[0], str):
            found[text] = differences(*outcomes)
    return found


def check(name):
    texts = [text for text in PLANS if FAMILIES[name].takes(text)]
    trains = {text for text, is_equal in documented()[name].items() if is_equal} & set(texts) | {"dp=1"}
    for size in (1, 2):
        some = [text for text in texts if par.Plan.parse(text).world_size == size]
        for found in spawn(size, compared, name, some, limit=600) if some else ():
            wrong = {text: places[:5] for text, places in found.items() if places}
            assert not wrong, wrong
            assert found.keys() == trains & set(some), (
                "a plan was refused that trains, or the other way round"
            )


without_vision = pytest.mark.skipif(not have_vision(), reason="timm, torchvision: see `make test-models`")


@tier(slow=1 / 8)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[without_vision] * each.vision) for name, each in FAMILIES.items()],
)
def test_no_bit_is_changed(name):
    check(name)


@tier(slow=1)
def test_no_bit_is_changed_of_one_family():
    check("llama")
