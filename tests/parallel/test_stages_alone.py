"""Models cut into stages, in one process: outputs, gradients and what forwards keep, as of the whole model,
call after call.
"""

import models
import pytest
import torch
from odd_models import LastUsed, OneUsed, Plain
from stages_alone import Alone
from test_outer_state import Counted, Keeping, Passes
from torch import nn

from pycomm.parallel.pipeline.absent import Absent, is_absent

CHAINS = {
    "two": ((0, 1), None),
    "uneven": ((0, 1), (1, 3)),
    "three": ((0, 1, 2), (1, 1, 2)),
    "four": ((0, 1, 2, 3), None),
    "V": ((0, 1, 1, 0), None),
    "interleaved": ((0, 1, 0, 1), None),
}


class Extra(Plain):
    """In training its blocks are given what the stage before has made, too: a number for each row, and whole
    numbers.
    """

    def __init__(self):
        super().__init__(WithMore, 4)

    def run_blocks(self, x):
        more = {"scale": x.mean((1, 2), keepdim=True), "sign": (x[:, :1, :1] > 0).long()}
        for block in self.blocks:
            x = block(x, **(more if self.training else {}))
        return x


class WithMore(models.Block):
    def forward(self, x, scale=None, sign=None):
        x = super().forward(x)
        return x if scale is None else x * (1 + scale) + sign


class Frozen(Plain):
    """The first and the last block have one frozen weight, and one that is trained."""

    def __init__(self):
        super().__init__(layers=4)
        first, *_, last = self.blocks
        last.mlp[0].weight, last.ln_1.weight = first.mlp[0].weight, first.ln_1.weight
        first.mlp[0].weight.requires_grad_(False)


class Grows(Plain):
    """Makes a buffer, a number and a list in its first forward."""

    def __init__(self):
        super().__init__(layers=4)

    def forward(self, idx):
        if not hasattr(self, "total"):
            self.seen, self.lengths = 0, []
            self.register_buffer("total", torch.zeros(()))
        self.seen += 1
        self.lengths = [*self.lengths, len(idx)]
        self.total += len(idx)
        return super().forward(idx) * (self.seen + self.total + sum(self.lengths))


def plain():
    return Plain(layers=4)


MODELS = {
    "plain": plain,
    "tied": models.GPT,
    "rotary": lambda: models.Llama(layers=4),
    "second results": OneUsed,
    "last used": LastUsed,
    "extra": Extra,
    "frozen": Frozen,
    "counted": Counted,
    "passes": Passes,
    "keeping": Keeping,
    "grows": Grows,
}
CASES = [
    ("plain", "interleaved"),
    ("tied", "V"),
    ("rotary", "uneven"),
    ("second results", "three"),
    ("last used", "two"),
    ("extra", "uneven"),
    ("frozen", "V"),
    ("counted", "three"),
    ("passes", "uneven"),
    ("keeping", "two"),
    ("grows", "two"),
    pytest.param("extra", "four", marks=pytest.mark.slow),
    pytest.param("tied", "four", marks=pytest.mark.slow),
]


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


@pytest.mark.parametrize("name, chain", CASES)
def test_as_the_whole_model(name, chain):
    """Calls of two shapes, in eval mode and in training again."""
    whole, cut = made(name), Alone(lambda: made(name), *CHAINS[chain])
    random = torch.get_rng_state()
    for rows, training in ((1, True), (3, True), (3, False), (3, True)):
        idx = torch.randint(0, 29, (rows, 7), generator=torch.Generator().manual_seed(rows))
        whole.train(training), cut.train(training)
        with torch.set_grad_enabled(training):
            expected, found = whole(idx), cut.forward(idx)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
        if training and rows > 1:
            for each in (whole, *cut.models):
                each.zero_grad(set_to_none=True)
            expected.square().sum().backward()
            cut.backward(found.square().sum())
            check_gradients(whole, cut)
    assert torch.equal(random, torch.get_rng_state())


def check_gradients(whole, cut):
    """A tied weight has copies, of which each has its stage's part of the gradient."""
    expected = {id(p): p.grad for p in whole.parameters() if p.grad is not None}
    found = {}
    first = {name: id(p) for name, p in whole.named_parameters(remove_duplicate=False)}
    for model in cut.models:
        copies = {}  # id of one -> (id in the whole, gradient)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not is_absent(parameter):
                assert parameter.requires_grad == whole.get_parameter(name).requires_grad, name
            if parameter.grad is not None:
                copies[id(parameter)] = first[name], parameter.grad
        for key, gradient in copies.values():
            found[key] = found.get(key, 0) + gradient
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.allclose(found[key], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_after_an_error_in_any_stage(stage):
    """The next call is as if there had been none, whichever stage raised."""
    torch.manual_seed(0)
    cut, whole = Alone(lambda: made("tied"), (0, 1, 2)), made("tied")
    idx = torch.arange(12).view(2, 6)
    block, stages = cut.models[stage].blocks[stage], cut.stage_models[stage]
    handle = block.register_forward_pre_hook(lambda *_: 1 / (stage > 0 and stages.received is None))
    with pytest.raises(ZeroDivisionError):
        cut.forward(idx)
    handle.remove()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert torch.allclose(cut.forward(idx), whole(idx), rtol=1e-12)
    with pytest.raises(ValueError, match="a part of it is called by itself"):
        block(torch.zeros(1, 2, 24).double())
    assert stages.received is None and not stages.deliveries.made


def test_what_two_stages_of_a_rank_write_is_named():
    for name, what in (("counted", "'count' of a Counted"), ("passes", "'passes' of a Passes")):
        cut = Alone(lambda name=name: made(name), (0, 1, 1, 0))
        with pytest.raises(ValueError, match=f"writes to {what} outside .* in stages 1 and 2 of one"):
            cut.forward(torch.zeros(2, 7, dtype=torch.long))


def test_modules_of_other_stages_hold_no_memory():
    cut = Alone(lambda: made("plain"), (0, 1, 2), (1, 2, 1))
    sizes = [{n for n, p in model.named_parameters() if not is_absent(p)} for model in cut.models]
    names = set(dict(made("plain").named_parameters()))
    assert set.union(*sizes) == names and sum(map(len, sizes)) == len(names)
    assert [any(n.startswith("blocks.1") for n in own) for own in sizes] == [False, True, False]
    assert "tok.weight" in sizes[0] and {"head.weight", "norm.bias"} <= sizes[2]
    assert all(isinstance(module, nn.Module) for module in cut.models)


@pytest.mark.parametrize("name", ["counted", "passes", "keeping", "grows"])
def test_a_run_for_shapes_leaves_nothing(name):
    cut = Alone(lambda: made(name), (0, 1))
    idx, model = torch.zeros(2, 7, dtype=torch.long), cut.models[1]
    for _ in range(2):
        held = dict(vars(model)), dict(model._buffers), dict(model._modules)
        values = {key: each.clone() for key, each in model._buffers.items() if not isinstance(each, Absent)}
        cut.wanted(1, (idx,))
        now = dict(vars(model)), dict(model._buffers), dict(model._modules)
        for before, after in zip(held, now, strict=True):
            assert before.keys() == after.keys() and all(after[key] is each for key, each in before.items())
        assert all(torch.equal(now[1][key], each) for key, each in values.items())
        cut.forward(idx)  # and with what this has left
