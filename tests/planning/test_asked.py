"""Odd and impossible requests: each is refused with a sentence and exit status 2, and what a refusal says
would do, does.
"""

import json
import re
import sys

import pytest

from pycomm.parallel import Plan, auto, explain
from pycomm.parallel.planning import NoPlan, load_machine, named
from pycomm.parallel.planning.__main__ import main
from pycomm.parallel.planning.machine import FOLDER, from_toml, tomllib
from pycomm.parallel.planning.named import from_config
from pycomm.parallel.planning.search import Request, search

GIB = 2**30
SMALL = ["--model", "gpt3-1.3b", "--gpus", "8", "--batch", "16"]


def request(model="gpt3-1.3b", world=8, rows=16, machine="h100", **more):
    return Request(named(model), load_machine(machine), world, rows, **more)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpus", "0"], "ranks=0: must be a whole number, from 1 to"),
        (["--gpus", "-8"], "ranks=-8"),
        (["--gpus", str(10**30)], "from 1 to 1,000,000,000"),
        (["--batch", "0"], "batch=0"),
        (["--sequence", "0"], "sequence=0"),
        (["--sequence", "-1"], "sequence=-1"),
        (["--memory", "0"], "memory=0.0"),
        (["--memory", "nan"], "memory=nan"),
        (["--memory", "inf"], "memory=inf"),
        (["--microbatch", "0"], "microbatch=0"),
        (["--top", "0"], "--top=0"),
        (["--explain", "dp=8", "--microbatches", "0"], "microbatches=0"),
        (["--explain", "dp=8", "--microbatches", "3"], "16 rows cannot be cut into 3 microbatches for 8"),
        (["--explain", "ep=8"], "no experts"),
        (["--explain", "single process"], "is for 1 ranks, --gpus says 8"),
        (["--fix", "ep=2"], "no experts"),
        (["--fix", "pp=2,stages=20:5"], "25 blocks, but the model has 24"),
        (["--fix", "zero=2,schedule=pipedream"], "zero=0"),
        (["--gpus", "1", "--costs"], "two ranks or more"),
        (["--model", "nowhere.json"], "No such file"),
        (["--machine", "z80"], "known are a100-selene"),
        (["--trace", "/nowhere/step.json"], "/nowhere/step.json"),
    ],
)
def test_the_command_refuses_with_a_sentence(arguments, text, capsys):
    assert main([*SMALL, *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", ["", "{", "[]", "3", '{"model_type": "bert"}', b"\xff\xfe"], ids=lambda given: repr(given)
)
def test_a_broken_config_is_refused(given, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_bytes(given if isinstance(given, bytes) else given.encode())
    assert main(["--model", str(path), *SMALL[2:]]) == 2
    assert "error: " in capsys.readouterr().err


def test_plots_without_matplotlib_and_calibrate(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SMALL, "--plot", str(tmp_path)]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
    assert main(["calibrate", "--ranks", "0"]) == 2
    assert main(["calibrate", "--out", str(tmp_path / "no" / "file.toml")]) == 2
    assert "file.toml" in capsys.readouterr().err


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 9, "n_positions": 64}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**LLAMA, "hidden_size": "64"}, "hidden_size='64'"),
        ({**LLAMA, "num_hidden_layers": 4.5}, "num_hidden_layers=4.5"),
        ({**LLAMA, "hidden_size": -64}, "hidden_size=-64"),
        ({**LLAMA, "num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=64"),
        ({**LLAMA, "num_key_value_heads": 3}, "does not divide num_attention_heads=4"),
        ({**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 of 2"),
        ({**LLAMA, "model_type": "bert"}, "'bert' is not known"),
        ({**LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 8}, "'deepseek_v3' is not known"),
        *(({k: v for k, v in GPT2.items() if k != key}, f"has no {key}") for key in [*GPT2][1:]),
    ],
)
def test_a_config_that_is_not_known_or_wrong(config, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        from_config(config)
    assert from_config(LLAMA).layers == from_config(GPT2).layers == 4


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"])
def test_families_have_as_many_parameters_as_the_model(kind):
    hf = pytest.importorskip("transformers")
    import torch

    sizes = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28} if "Moe" in kind else {}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2} if "Moe" in kind else {}
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(hf, f"{kind}Config")(vocab_size=71, intermediate_size=80, **shape, **sizes)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    assert from_config(config).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("gb_s = 360", "gb_s = true", "gb_s = True"),
        ("ranks = 8", "ranks = 7.5", "whole number"),
        ("ranks = 8", "ranks = 0", "or two"),
        ("product = 0.70", "product = 70", "1 at most"),
        ("attention = 1", "attention = 1.5", "attention = 1.5: a share is 1 at most"),
        ("overlap = 1", "overlap = 2", "overlap = 2: a share is 1 at most"),
        ("overlap = 1", "", "missing or unknown: overlap"),
        ("reserved_gib = 3", "reserved_gib = 80", "leaves nothing"),
        ("memory_gb_s = 3350", "memory_gb_s = nan", "above 0"),
        ("[device]", "speed = 3\n[device]", "'speed'"),
    ],
)
def test_a_wrong_number_of_a_machine(old, new, text):
    table = (FOLDER / "h100-dgx.toml").read_text()
    assert old in table
    with pytest.raises(ValueError, match=text):
        from_toml(tomllib.loads(table.replace(old, new, 1)))


@pytest.mark.parametrize("text", ["device = [1]", "[device", "device = 3\nlink = [1, 2]"])
def test_a_file_that_is_no_machine(text, tmp_path):
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"m\.toml"):
        load_machine(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no TOML"):
        load_machine(str(path))


WITH = r"(?:, with ([\d.]+) GiB per rank)?"


def gib(text, asked):
    return float(text) * GIB if text else asked.memory


def relieved(asked, text):
    """The requests that a refusal says would do."""
    found = re.search(r"What would do: ([\d.]+) GiB per rank", text)
    if found:
        yield asked._replace(memory=float(found[1]) * GIB)
    found = re.search(r"; or (\d+) ranks(?: with batches of (\d+) rows)?", text)
    if found:
        yield asked._replace(world=int(found[1]), rows=int(found[2] or asked.rows))
    found = re.search(rf"What would do: batches of (\d+) rows{WITH}", text)
    if found:
        yield asked._replace(rows=int(found[1]), memory=gib(found[2], asked))
    found = re.search(rf"microbatch=(\d+){WITH}", text)
    if found:
        yield asked._replace(microbatch=int(found[1]), memory=gib(found[2], asked))
    found = re.search(rf", or batches of (\d+) rows{WITH}", text)
    if found:
        yield asked._replace(rows=int(found[1]), memory=gib(found[2], asked))
    for key in re.findall(r"or leave (\w+)=\S+ open", text):
        yield asked._replace(fixed={name: v for name, v in asked.fixed.items() if name != key})


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"memory": 3 * GIB}, 2),
        ({"memory": 0.001 * GIB}, 1),
        ({"memory": 3 * GIB, "fixed": {"zero": 0, "tp": 1, "dp": 8}}, 1),
        ({"world": 17, "fixed": {"pp": 1}}, 2),
        ({"world": 17, "fixed": {"pp": 1}, "memory": GIB}, 1),
        ({"rows": 5, "fixed": {"dp": 4}, "microbatch": 1}, 2),
        ({"rows": 5, "fixed": {"dp": 4}, "microbatch": 1, "memory": 0.01 * GIB}, 2),
        ({"world": 64, "rows": 1, "fixed": {"tp": 1, "pp": 16, "schedule": "zbv"}}, 0),
        ({"world": 64, "rows": 1, "fixed": {"tp": 1, "zero": 1, "schedule": "pipedream"}}, 0),
        ({"machine": "cpu", "model": "gpt3-13b", "world": 4, "rows": 4}, 2),
        ({"memory": 8 * GIB, "fixed": {"pp": 1, "tp": 1, "checkpoint": False, "zero": 1}}, 3),
    ],
)
def test_what_would_do_does(change, count):
    asked = request(**change)
    with pytest.raises(NoPlan) as refused:
        search(asked)
    others = list(relieved(asked, str(refused.value)))
    assert len(others) >= count, str(refused.value)
    for other in others:
        assert search(other, 1), (str(refused.value), other)


@pytest.mark.parametrize(("world", "rows"), [(4, 5), (3, 16)])
def test_every_microbatch_has_a_row_for_every_data_rank(world, rows):
    """par.step refuses others; and none is larger than was allowed."""
    for most in (1, 2, 16):
        try:
            found = search(request(world=world, rows=rows, microbatch=most), 10**6)
        except NoPlan:
            continue
        for each in found:
            job = each.job
            assert job.microbatches * job.data_ranks <= rows and job.microbatch_rows <= most, each.plan


@pytest.mark.parametrize(
    ("plan", "microbatches"),
    [("dp=8,zero=3", 1), ("dp=8,zero=2", 2), ("dp=4,tp=2,zero=3,megatron_sp", 1), ("pp=8,schedule=zbv", 16)],
)
def test_the_best_is_no_slower_than_a_plan_that_is_written(plan, microbatches):
    best = search(request(), 1)[0]
    other = explain(Plan.parse(plan), "gpt3-1.3b", batch=16, microbatches=microbatches, machine="h100")
    assert best.seconds <= other.prediction.seconds * (1 + 1e-9)


def test_more_never_hurts():
    """Memory, bandwidth and a larger allowed microbatch; the search is deterministic."""
    asked = request("gpt3-13b", 8, 16, memory=30 * GIB, microbatch=2)
    before = search(asked)
    again = search(asked)
    assert [(e.plan, e.job.microbatches) for e in before] == [(e.plan, e.job.microbatches) for e in again]
    links = tuple(link._replace(bandwidth=2 * link.bandwidth) for link in asked.machine.links)
    for change in (
        {"memory": 60 * GIB},
        {"microbatch": 8},
        {"machine": asked.machine._replace(links=links)},
    ):
        assert search(asked._replace(**change), 1)[0].seconds <= before[0].seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "fixed",
    [
        {"offload": "parameters"},
        {"compression": "int8"},
        {"chunks": 3},
        {"pp": 2, "chunks": 5},
        {"pp": 2, "stages": (20, 4)},
        {"schedule": "gpipe"},
        {"zero_group": "host"},
        "pp=2, stages=20:4",
    ],
)
def test_fixed_fields_choose_the_others(fixed):
    plan = auto("gpt3-1.3b", batch=16, world=8, machine="h100", fixed=fixed)
    fixed = {"pp": 2, "stages": (20, 4)} if isinstance(fixed, str) else fixed
    assert all(getattr(plan, key) == value for key, value in fixed.items())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fixed": {"foo": 1}}, "has no 'foo'"),
        ({"fixed": [1]}, "must be a dict"),
        ({"fixed": {"tp": "2"}}, "tp='2'"),
        ({"fixed": {"rules": {"*": "replicate"}}}, "does not predict rules"),
        ({"world": 2.0}, "ranks=2.0"),
        ({"machine": 7}, "machine=7"),
        ({"opt": "adam"}, "opt='adam'"),
        ({"model": {**LLAMA, "vocab_size": None}}, "no vocab_size"),
    ],
)
def test_auto_refuses_wrong_types(change, text):
    given = {"model": "gpt3-1.3b", "batch": 16, "world": 8, "machine": "h100", **change}
    with pytest.raises(ValueError, match=text):
        auto(given.pop("model"), given.pop("opt", None), **given)


def test_json_is_whole_numbers_and_no_nan(capsys):
    assert main([*SMALL, "--json", "--top", "1"]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["seconds"] > 0 and found["memory"]["peak"] > 0
