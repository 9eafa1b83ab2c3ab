"""A family under plans beside one process: three steps in fp64, the losses and every parameter.

                     families.py                              plans below
                         |                                        |
    alone():  plain torch in one process       under():  parallelize, then par.step with two microbatches
                         |                                        |
                         +----------- outcome(): equal, refused, wrong or crash ----------+

An error of a parameter is the norm of its difference over the norm of what training has changed in it, so
that a gradient of a small scale is seen as well as a large one. Many models compute a part in fp32 whatever
they are given (norms, softmax), where a difference in the last bit of fp64 may end on the other side of a
rounding, 6e-8 away; gemma2, which does so most often, was seen at 1.3e-7. So the bound is 1e-6.
"""

import copy
import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from families import FAMILIES
from torch_ranks import LIMIT, spawn

import pycomm.parallel as par

STEPS, BOUND = 3, 1e-6
# One of each axis; `make test` runs these.
AXES = [
    "dp=2",
    "dp=2,zero=3",
    "tp=2",
    "tp=2,megatron_sp",
    "pp=2,schedule=1f1b",
    "ulysses=2",
    "ring=2",
    "ep=2",
]
MORE = [
    "dp=2,zero=1",
    "dp=2,zero=2",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=zb-h1",
    "pp=2,schedule=zbv",
    "dp=2,checkpoint",
    "pp=2,checkpoint",
    "dp=2,tp=2",
    "tp=2,pp=2",
    "dp=2,pp=2,zero=1",
    "ep=2,zero=3",
    "ep=2,pp=2",
]


class Outcome(NamedTuple):
    kind: str  # equal, refused, wrong, crash
    text: str = ""  # why
    in_step: bool = False  # so that other ranks may wait for this one


def make(name):
    torch.manual_seed(0)
    return FAMILIES[name].make().double().train()


def batches(name):
    generator = torch.Generator().manual_seed(3)
    return [FAMILIES[name].batch(generator) for _ in range(STEPS)]


def optimizer(model):
    """Not Adam: where a gradient is zero but for rounding, as that of a key's bias, Adam makes it a step like
    any other.
    """
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def own_loss(model, batch):
    """As one process computes it in fp64. transformers' own loss, in fp32, must agree."""
    out = model(**batch)
    labels, logits = batch["labels"], out.logits
    aligned = logits.dim() == 2 or "Masked" in type(model).__name__ or model.config.is_encoder_decoder
    if not aligned:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    assert abs(out.loss.item() - loss.item()) < 1e-5 * loss.item(), (out.loss.item(), loss.item())
    return loss


def alone(name):
    """(losses, parameters at the end, norm of the change of each)."""
    model, family = make(name), FAMILIES[name]
    opt, losses = optimizer(model), []
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    for batch in batches(name):
        opt.zero_grad()
        if family.loss is None:
            loss = own_loss(model, batch)
        else:
            inputs, targets = batch
            loss = family.loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    after = {key: value.detach() for key, value in model.named_parameters()}
    return losses, after, {key: (after[key] - before[key]).norm().item() for key in after}


def under(rank, world_size, name, texts, reference):
    """The outcome of each plan on this rank, until one has failed in a step: then this rank ends, as a
    user's would, which the others must be told.
    """
    outcomes = []
    for text in texts:
        outcomes.append(_under(name, text, reference))
        if outcomes[-1].in_step or outcomes[-1].kind == "crash":
            break
    return outcomes


def _under(name, text, reference):
    family = FAMILIES[name]
    model = make(name)
    opt = optimizer(model)
    plan = par.Plan.parse(text + (f",blocks={family.blocks}" if family.blocks else ""))
    in_step = False
    try:
        model, opt = par.parallelize(model, opt, plan)
        in_step = True
        losses = [
            par.step(model, opt, copy.copy(batch), family.loss, microbatches=family.microbatches).item()
            for batch in batches(name)
        ]
        return _compared(losses, par.full_state_dict(model), reference)
    except ValueError as error:
        return Outcome("refused", _without_rank(str(error)), in_step)
    except Exception as error:  # noqa: BLE001
        return Outcome("crash", f"{type(error).__name__}: {error}", in_step)


def _without_rank(text):
    return re.sub(r"^\[rank [^\]]*\] ", "", text)


def _compared(losses, state, reference):
    right, parameters, changes = reference
    for step, (found, expected) in enumerate(zip(losses, right, strict=True)):
        if not abs(found - expected) <= BOUND * abs(expected):
            return Outcome("wrong", f"loss of step {step}: {found!r} for {expected!r}")
    for key, value in parameters.items():
        error = (state[key] - value).norm().item()
        if not error <= BOUND * (changes[key] + 1e-5 * value.norm().item()) + 1e-15:
            return Outcome(
                "wrong", f"{key}: off by {error:.1e} where training changed it by {changes[key]:.1e}"
            )
    return Outcome("equal")


def outcomes(name, texts, limit=LIMIT):
    """{plan: Outcome} of a family, of the plans that it takes; the ranks must agree. Plans of one size share
    their ranks, which have `limit` seconds.
    """
    texts = [text for text in texts if FAMILIES[name].takes(text)]
    reference, found = alone(name), {}
    sizes = {text: par.Plan.parse(text).world_size for text in texts}
    for size in sorted(set(sizes.values())):
        left = [text for text in texts if sizes[text] == size]
        while left:
            by_rank = spawn(size, under, name, left, reference, limit=limit)
            done = min(len(results) for results in by_rank)
            for index, text in enumerate(left[:done]):
                found[text] = _agreed([results[index] for results in by_rank])
            left = left[done:]
    return {text: found[text] for text in texts}


def _agreed(ranks):
    """That of all ranks. A rank that was told of the refusal of another one has refused."""
    refused = [outcome for outcome in ranks if outcome.kind == "refused"]
    if refused:
        ranks = [refused[0] if " had raised ValueError: " in outcome.text else outcome for outcome in ranks]
    kinds = [outcome.kind for outcome in ranks]
    for kind in ("crash", "wrong"):
        if kind in kinds:
            return ranks[kinds.index(kind)]
    if len(set(kinds)) > 1:
        return Outcome("crash", f"the ranks differ: {ranks}")
    return ranks[0]
