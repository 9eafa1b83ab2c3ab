"""par.describe: what a plan has made of a model, on every rank."""

import logging

import pytest
import torch
from odd_models import Plain
from torch_ranks import spawn

import pycomm.parallel as par

NUMBERS = sum(parameter.numel() for parameter in Plain(layers=4).parameters())


def described(rank, world_size, text, dtype=torch.float32):
    torch.manual_seed(0)
    model = Plain(layers=4).to(dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    par.parallelize(model, opt, par.Plan.parse(text))
    found = par.describe(model)
    held = sum(parameter.numel() for group in opt.param_groups for parameter in group["params"])
    assert found.numel["updated"] == held
    return str(found), found.numel, found.nbytes, found.axes


def run(text, *args):
    return spawn(par.Plan.parse(text).world_size, described, text, *args)


def test_one_process():
    [(text, numel, nbytes, axes)] = run("")
    assert axes == {} and numel == {"model": NUMBERS, "here": NUMBERS, "updated": NUMBERS}
    assert nbytes["model"] == 4 * NUMBERS
    assert text.splitlines()[0] == "Plan(single process), rank 0 of 1"


def test_a_sharded_model():
    """Chunks are padded to equal lengths, by less than a number per rank and bucket."""
    for _, numel, _, axes in run("dp=2,zero=3", torch.float64):
        assert numel["model"] == NUMBERS and list(axes) == ["dp"]
        assert NUMBERS / 2 <= numel["here"] < NUMBERS / 2 + 200
    for (_, numel, nbytes, _), text in zip(run("dp=3,zero=1"), range(3), strict=True):
        assert NUMBERS <= numel["here"] < NUMBERS + 200 and numel["updated"] < NUMBERS / 2, text
        assert nbytes["updated"] == 4 * numel["updated"]


def test_layers_that_are_cut_and_those_that_are_not():
    first, _, last, _ = run("tp=2,pp=2,schedule=gpipe")
    assert "pp       0 of 2: stage 0, blocks 0 to 1 of 'blocks' and what comes before; gpipe" in first[0]
    assert "pp       1 of 2: stage 1, blocks 2 to 3 of 'blocks' and what comes after; gpipe" in last[0]
    lines = [line.split() for line in first[0].splitlines()]
    assert ["blocks.*.mlp", "4", "x", "mlp"] in [line[:4] for line in lines]
    assert ["tok", "vocab", "29", "rows"] in lines
    assert first[1]["here"] + last[1]["here"] < 0.7 * NUMBERS


def refused(rank, world_size):
    torch.manual_seed(0)
    model = Plain()
    par.parallelize(model, None, par.Plan(tp=2, rules={"blocks.0.attn": "replicate"}))
    return str(par.describe(model))


def test_what_stays_whole_has_its_reason():
    for text in spawn(2, refused):
        assert ["blocks.*.attn", "replicate", "by", "rule"] in [line.split() for line in text.splitlines()]


def logged(rank, world_size):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("pycomm.parallel")
    log.addHandler(handler)
    for level in (logging.WARNING, logging.INFO):
        log.setLevel(level)
        par.parallelize(Plain(), None, par.Plan(dp=2))
    return [record.getMessage().splitlines()[0] for record in records]


def test_it_is_logged_where_that_is_asked_for():
    assert spawn(2, logged) == [[f"Plan(dp=2), rank {rank} of 2"] for rank in range(2)]


def test_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="not been through parallelize"):
        par.describe(Plain())
