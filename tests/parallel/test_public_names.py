"""Freezes what `import pycomm.parallel` offers: a change of these lists is a change of the public API."""

import inspect

import pytest

import pycomm.parallel as par

PUBLIC = """MoE Plan auto clip_grad_norm_ count_traffic cross_entropy describe ema evaluate explain
full_gradients full_state_dict gather_rows gathered grad_norm load load_state_dict num_parameters parallelize
predict resilient sampler save state_dict step verify""".split()

FOLDERS = {
    "data": ["DistributedDataParallel", "NaiveDataParallel", "gather_rows", "make_compression"],
    "expert": ["MoE"],
    "pipeline": """Action DeferWeights ModelParallel NAMES Schedule StageOps Timeline WeightStash WeightStore
        accumulate_grad make_schedule peak_activations run simulate validate""".split(),
    "planning": "NoPlan auto dry_run explain load_machine named simulate trace_model".split(),
    "recovery": ["Resilient", "resilient"],
    "sequence": """SequenceAttention cut lengths local_length positions ring_attention ring_spans
        ring_ulysses_attention spans ulysses_attention ulysses_sizes""".split(),
    "tensor": """ColumnParallelLinear Head RankHeads RowParallelLinear TensorParallel VocabParallelEmbedding
        VocabShard cross_entropy parallelize_tensor split_heads""".split(),
}

# Names that the front had before they moved to a folder.
MOVED = {
    "ColumnParallelLinear": "tensor",
    "DistributedDataParallel": "data",
    "ModelParallel": "pipeline",
    "NaiveDataParallel": "data",
    "RowParallelLinear": "tensor",
    "VocabParallelEmbedding": "tensor",
    "make_schedule": "pipeline",
    "ring_attention": "sequence",
    "ring_ulysses_attention": "sequence",
    "simulate": "planning",
    "ulysses_attention": "sequence",
}


def test_the_front_is_frozen():
    assert sorted(par.__all__) == PUBLIC
    assert dir(par) == sorted([*PUBLIC, *FOLDERS])


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folders_are_frozen(folder):
    package = getattr(par, folder)
    assert sorted(package.__all__) == FOLDERS[folder]
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    assert inspect.getdoc(getattr(par, name))


@pytest.mark.parametrize("name", MOVED)
def test_the_error_says_where_a_name_is(name):
    with pytest.raises(AttributeError, match=f"write .*pycomm.parallel.{MOVED[name]}.{name}"):
        getattr(par, name)
    assert hasattr(getattr(par, MOVED[name]), name)


def test_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'paralelize'$"):
        par.paralelize  # noqa: B018
