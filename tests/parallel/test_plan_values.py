"""What a Plan takes, field by field: what is refused with which words, its text and back, what it says of
itself.
"""

import dataclasses
import math

import pytest

from pycomm.parallel import Plan
from pycomm.parallel.ground.plan import AXES, ScheduleName, fields_of

BAD_AXIS = [0, -1, 2.0, "2", None, True, False, float("nan")]
ONE_OF = {
    "zero": [4, -1, True, "1", None],
    "zero_group": ["hosts", None, True],
    "schedule": ["1F1B", None, "", True],
    "grad_sync": ["gloo", None],
    "precision": ["fp16", "bfloat16", True],
    "offload": ["params", True],
    "compression": ["int4", True, 3],
}
# fields -> parts of the error
REFUSED = [
    ({"bucket_mb": 0}, ["bucket_mb=0)", "must be positive"]),
    ({"bucket_mb": -2.5}, ["bucket_mb=-2.5)", "must be positive"]),
    ({"bucket_mb": float("nan")}, ["bucket_mb=nan)", "must be positive"]),
    ({"trust": "row"}, ["trust='row'", "'rows', 'loss', 'positions'"]),
    ({"trust": ("rows", "los")}, ["trust='los'"]),
    ({"compare_every": 0}, ["compare_every=0)", "1 or more, or None"]),
    ({"compare_every": -3}, ["compare_every=-3)"]),
    ({"compare_every": True}, ["compare_every=True)"]),
    ({"compare_every": 1.5}, ["compare_every=1.5)"]),
    ({"zero": 1, "compression": "int8"}, ["compression='int8', zero=1)", "with zero=0 only"]),
    ({"zero": 2, "compression": lambda: None}, ["compression=<function", "zero=2)"]),
    ({"zero": 3, "grad_sync": "naive"}, ['grad_sync="naive", zero=3)']),
    ({"zero_group": "host"}, ["zero_group='host', zero=0)", "choose zero=1, 2 or 3"]),
    (
        {"compression": "topk", "grad_sync": "naive"},
        ["compression='topk', grad_sync=", "choose one"],
    ),
    ({"offload": "parameters"}, ['offload="parameters", zero=0)', "only zero=3"]),
    ({"offload": "parameters", "zero": 2}, ['offload="parameters", zero=2)']),
    ({"chunks": 2}, ["chunks=2, schedule='1f1b'", "has 1 per rank"]),
    ({"chunks": 1, "schedule": "zbv"}, ["chunks=1", "has 2 per rank"]),
    ({"chunks": 0, "schedule": "interleaved"}, ["chunks=0)", "at least one stage"]),
    ({"pp": 2, "stages": (1, 2, 3)}, ["stages=(1, 2, 3)", "needs 2 positive numbers (pp=2 x 1 chunks)"]),
    ({"pp": 2, "stages": (3, 0)}, ["stages=(3, 0)", "needs 2 positive"]),
    ({"pp": 2, "stages": (1, 1), "schedule": "zbv"}, ["needs 4 positive numbers (pp=2 x 2 chunks)"]),
    ({"stages": (1, 1)}, ["needs 1 positive numbers"]),
    *(
        ({"pp": 2, "schedule": "pipedream", **more}, ['schedule="pipedream"', "neither precision nor"])
        for more in ({"zero": 1}, {"precision": "bf16"}, {"compression": "fp16"})
    ),
]
TAKEN = [
    {"chunks": 1},
    {"chunks": 2, "schedule": "zbv"},
    {"chunks": 3, "schedule": "interleaved", "pp": 2, "stages": (1, 2, 1, 1, 1, 1)},
    {"bucket_mb": 1e-9},
    {"compare_every": 1},
    {"offload": "parameters", "zero": 3},
    {"offload": "optimizer"},
    {"zero": 3, "zero_group": "host"},
    {"grad_sync": "naive"},
    {"compression": "powersgd"},
    {"pp": 2, "schedule": "pipedream", "stages": (2, 1)},
    {"stages": [5]},
]


def test_axes_are_whole_numbers():
    for axis in AXES:
        for value in BAD_AXIS:
            with pytest.raises(ValueError, match=rf"Plan\({axis}={value!r}\): the number of ranks"):
                Plan(**{axis: value})


def test_words_are_of_a_list_and_a_bool_is_no_number():
    for name, values in ONE_OF.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"Plan\({name}={value!r}\): must be one of "):
                Plan(**{name: value})


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda each: str(each).partition(" at 0x")[0][:60])
def test_what_contradicts_itself(fields, words):
    with pytest.raises(ValueError, match=r"^Plan\(") as caught:
        Plan(**fields)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("fields", TAKEN, ids=str)
def test_what_is_taken(fields):
    plan = Plan(**fields)
    assert Plan.parse(str(plan)) == plan and Plan.of(plan) is plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.dp = 2


# a value of each field that is not the default
OTHER = {
    **{axis: number for number, axis in enumerate(AXES, 2)},
    **{"zero": 3, "zero_group": "host", "grad_sync": "naive", "compression": "int8", "bucket_mb": 0.5},
    **{"precision": "bf16", "offload": "optimizer", "megatron_sp": True, "zigzag": False},
    **{"schedule": "interleaved", "chunks": 3, "stages": (7,), "checkpoint": True, "blocks": "h"},
    **{"trust": ("rows", "positions"), "compare_every": 100},
}
NEEDS = {"zero_group": {"zero": 1}, "chunks": {"schedule": "interleaved"}}


def test_each_field_by_its_text():
    names = [field.name for field in dataclasses.fields(Plan)]
    assert {*OTHER, "rules"} == {*names}
    for name, value in OTHER.items():
        plan = Plan(**NEEDS.get(name, {}), **{name: value})
        assert plan != Plan() and plan != Plan(**NEEDS.get(name, {}))
        assert Plan.parse(str(plan)) == plan, str(plan)
        assert f"{name}=" in str(plan) and fields_of(str(plan))[name] == value
    assert str(Plan(blocks=["a.b", "c"])) == "blocks=a.b+c" and Plan.parse("blocks=a.b+c").blocks == (
        "a.b",
        "c",
    )
    assert str(Plan()) == "single process" and fields_of(" , ") == {}
    assert Plan(stages=[2]) == Plan(stages=(2,)) and Plan(trust="loss").trust == ("loss",)
    for text, number in (("0.25", 0.25), (".5", 0.5), ("1e-3", 1e-3), ("2.5e3", 2500.0), ("25", 25)):
        assert Plan.parse(f"bucket_mb={text}").bucket_mb == number
    assert Plan.parse("zigzag=False,megatron_sp=TRUE") == Plan(zigzag=False, megatron_sp=True)


WRONG_TEXTS = [
    ("dp=2,dp=3", "dp is given twice"),
    ("dp=two", "dp='two' is not a whole number"),
    ("tp=2.0", "tp='2.0' is not a whole number"),
    ("zero=x", "zero='x' is not a whole number"),
    ("compare_every=often", "compare_every='often' is not a whole number"),
    ("chunks=a", "chunks='a' is not a whole number"),
    ("bucket_mb=big", "bucket_mb='big' is not a number"),
    ("pp=2,stages=3;2", "stages='3;2' must be numbers of blocks joined by colons"),
    ("pp=2,stages=3:", "stages='3:' must be"),
    ("rules=x", "there is no 'rules'"),
    ("dp2", "there is no 'dp2'"),
    ("dp", "Plan(dp=True)"),
    ("dp=-2", "Plan(dp=-2)"),
]


@pytest.mark.parametrize(("text", "words"), WRONG_TEXTS)
def test_texts_that_are_refused(text, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Plan.parse(text)
    assert words in str(caught.value)


def test_what_it_says_of_itself():
    sizes = {axis: number for number, axis in enumerate(AXES, 2)}
    assert Plan(**sizes).world_size == math.factorial(len(AXES) + 1)
    for axis in AXES:
        assert Plan(**{axis: 5}).world_size == 5
        cuts = axis in ("ring", "ulysses")
        assert Plan(**{axis: 2}).cuts_sequence is cuts
        assert Plan(**{axis: 2}, megatron_sp=True).cuts_sequence is (cuts or axis == "tp")
    for schedule in ScheduleName:
        chunks = {"interleaved": 2, "zbv": 2}.get(str(schedule), 1)
        for pp in (1, 3):
            plan = Plan(pp=pp, schedule=str(schedule))
            assert plan == Plan(pp=pp, schedule=schedule)
            assert plan.chunks_per_rank == chunks and plan.virtual_stages == (3 * chunks if pp > 1 else 1)
    assert Plan(pp=2, schedule="interleaved", chunks=5).virtual_stages == 10
