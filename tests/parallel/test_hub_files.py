"""Weights in the layout of the Hugging Face hub: which tensors of which files are this model's, by boxes."""

import json

import pytest
import torch
from torch import nn

from pycomm.parallel.checkpoint.hub import HubFiles

save_file = pytest.importorskip("safetensors.torch").save_file


class Tied(nn.Module):
    """Two names of one parameter, a buffer, a buffer that is not saved, a number."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mark", torch.arange(3))
        self.register_buffer("table", torch.ones(2), persistent=False)


FIRST = {"last.weight": "first.weight"}


def tensors(number):
    torch.manual_seed(number)
    model = Tied()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def write(folder, files, where=None):
    """files: {name: tensors}; where: of each tensor, the file that the index names."""
    folder.mkdir(exist_ok=True)
    for name, some in files.items():
        save_file({key: value.clone() for key, value in some.items()}, folder / name)
    index = {key: name for name, some in files.items() for key in some} | (where or {})
    if list(files) != ["model.safetensors"]:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def hub(folder, model=None, spared=lambda name: False):
    model = Tied() if model is None else model
    first = {name: FIRST.get(name, name) for name, _ in model.named_parameters(remove_duplicate=False)}
    return HubFiles(folder, model, first, spared)


def test_every_box_from_the_file_that_the_index_names(tmp_path):
    """Other files may have tensors of the same names, which are older."""
    new, old = tensors(0), tensors(1)
    one = {
        "first.weight": new["first.weight"],
        "scale": old["scale"],
        "mark": new["mark"],
        "strange": torch.ones(1),
    }
    two = {"scale": new["scale"], "first.bias": new["first.bias"], "first.weight": old["first.weight"]}
    where = {"first.weight": "a.safetensors", "scale": "b.safetensors"}
    folder = write(tmp_path / "two", {"a.safetensors": one, "b.safetensors": two}, where)
    index = folder / "model.safetensors.index.json"
    kept = {k: v for k, v in json.loads(index.read_text())["weight_map"].items() if k != "strange"}
    index.write_text(json.dumps({"weight_map": kept}))
    found = hub(folder)
    assert "scale" in found and "table" not in found and found.place("scale").endswith("b.safetensors")
    for _ in range(2):
        for name in ("first.weight", "scale", "first.bias", "mark"):  # from one file to the other and back
            whole = new[name]
            assert torch.equal(found.read(name, (0,) * whole.dim(), whole.shape), whole), name
        assert torch.equal(found.read("first.weight", (1, 2), (2, 1)), new["first.weight"][1:3, 2:])
        assert torch.equal(found.read("first.bias", (3,), (1,)), new["first.bias"][3:])
        found.close()


def test_a_tie_under_both_names(tmp_path):
    for equal in (True, False):
        state = tensors(0)
        state["last.weight"] = state["first.weight"].clone()
        state["last.weight"][3, 2] += not equal
        found = hub(write(tmp_path / str(equal), {"model.safetensors": state}))
        assert torch.equal(found.read("first.weight", (0, 0), (3, 3)), state["first.weight"][:3])
        if equal:
            found.read("first.weight", (3, 0), (1, 3))
            continue
        with pytest.raises(
            ValueError, match=r"'first.weight' and 'last.weight' differ in .*tie_word_embeddings"
        ):
            found.read("first.weight", (3, 0), (1, 3))


def changed(**more):
    state = {**tensors(0), **more}
    return {name: value for name, value in state.items() if value is not None and name != "last.weight"}


WRONG = {
    "'scale' of the model is not there$": changed(scale=None),
    r"'more' is there \(in model.safetensors\), which the model has not$": changed(more=torch.ones(1)),
    r"'mark' of the model is not there, and 'more' is there.*from_pretrained": changed(
        mark=None, more=torch.ones(1)
    ),
    r"'first.weight' has shape \(4, 2\) in .*and 'first.weight' has shape \(4, 3\)": changed(
        **{"first.weight": torch.ones(4, 2)}
    ),
    "'mark' is F32 in .*and 'mark' is torch.int64": changed(mark=torch.ones(3)),
    "'scale' is I32 in .*and 'scale' is torch.float32": changed(scale=torch.tensor(1, dtype=torch.int32)),
}


@pytest.mark.parametrize("words", WRONG)
def test_files_of_another_model(words, tmp_path):
    folder = write(tmp_path / "x", {"model.safetensors": WRONG[words]})
    with pytest.raises(ValueError, match=words):
        hub(folder)


def test_what_may_be_missing_and_other_kinds_of_numbers(tmp_path):
    folder = write(tmp_path / "x", {"model.safetensors": changed(scale=None)})
    assert "scale" not in hub(folder, spared=lambda name: name == "scale")
    half = changed(scale=torch.tensor(0.5, dtype=torch.bfloat16))
    assert (
        hub(write(tmp_path / "y", {"model.safetensors": half})).read("scale", (), ()).dtype == torch.bfloat16
    )


class Base(nn.Module):
    base_model_prefix = "inner"

    def __init__(self, head=True):
        super().__init__()
        if head:
            self.inner = Base(False)
            self.head = nn.Linear(2, 2, bias=False)
        else:
            self.layer = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (Base, {"inner.layer.weight": "inner.layer.weight", "head.weight": "head.weight"}),
        (Base, {"inner.layer.weight": "layer.weight", "head.weight": "head.weight"}),
        (lambda: Base(False), {"layer.weight": "inner.layer.weight"}),
        (lambda: nn.ModuleDict({"peft": Base(False)}), {"peft.layer.weight": "layer.weight"}),
    ],
    ids=["as they are", "of the base model", "of the whole model", "inside of another"],
)
def test_names_become_keys(make, keys, tmp_path):
    values = {key: torch.full((2, 2), float(number)) for number, key in enumerate(keys.values())}
    found = hub(write(tmp_path / "x", {"model.safetensors": values}), make())
    for name, key in keys.items():
        assert torch.equal(found.read(name, (0, 0), (2, 2)), values[key])
