"""Parts of a pipeline by themselves, in one process: what they refuse, in words with both values, and what
they put back.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pycomm.parallel.models.trunk import Side
from pycomm.parallel.pipeline import WeightStash
from pycomm.parallel.pipeline import updates as pipedream_updates
from pycomm.parallel.pipeline.absent import Absent, absent_like
from pycomm.parallel.pipeline.assumptions import Assumptions
from pycomm.parallel.pipeline.pieces import Pieces
from pycomm.parallel.pipeline.placement import Stages, cut_blocks
from pycomm.parallel.pipeline.progress import Place, Progress
from pycomm.parallel.pipeline.templates import _or_guess, check_like
from pycomm.parallel.pipeline.updates import PipeDreamUpdates
from pycomm.parallel.run.prepare import Options

GIVEN = torch.zeros(2, 3)
UNLIKE = [
    (GIVEN.double(), "(2, 3), torch.float64"),
    (GIVEN.t().contiguous(), "(3, 2), torch.float32"),
    (GIVEN[None], "(1, 2, 3), torch.float32"),
    ((GIVEN,), "a tuple"),
    (None, "a NoneType"),
]


def test_what_was_guessed_is_like_the_input():
    check_like("block 0", (GIVEN,), {}, torch.full((2, 3), torch.nan))
    check_like("block 0", (), {"hidden_states": GIVEN}, GIVEN)
    for out, said in UNLIKE:
        with pytest.raises(ValueError, match=re.escape(f"(2, 3), torch.float32; it is {said}")):
            check_like("block 0", (GIVEN,), {}, out)


def scaler(enabled):
    return torch.amp.GradScaler("cpu", enabled=enabled)


@pytest.mark.parametrize(
    "options, match",
    [
        ({}, None),
        ({"scaler": scaler(False)}, None),
        ({"scaler": scaler(True)}, r"scaler=\.\.\."),
        ({"clip": 0.0}, r"clip=0\.0"),
        ({"clip": 2.5}, r"clip=2\.5"),
        ({"update": False}, "update=False"),
    ],
)
def test_what_steps_of_single_stages_cannot_do(options, match):
    def make():
        return PipeDreamUpdates({}, print, None, torch.device("cpu"), Options(None, **options))

    if match is None:
        assert (make().weight, make().scale, make().separate) == (1.0, 1.0, True)
    else:
        with pytest.raises(ValueError, match=match):
            make()


def test_after_an_error_in_a_backward_the_latest_weights_are_there():
    """And the stash is as it was: the same backward can be run again."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((3,), 2.0))
    stash = WeightStash([first, second])
    with stash.saving(0):
        pass
    stash.detach_from_stash()
    with torch.no_grad():
        first += 1
        second += 1
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), stash.using(0):
            assert first.tolist() == [1, 1] and second.tolist() == [2, 2, 2]
            raise ZeroDivisionError
        assert first.tolist() == [2, 2] and second.tolist() == [3, 3, 3] and stash.versions == 2
    stash.drop(0)
    assert stash.versions == 1


def test_blocks_of_stages():
    """Every block once, in order; as even as it goes, the later stages longer; or as asked for."""
    for blocks in range(1, 12):
        for stages in range(1, blocks + 1):
            bounds = cut_blocks(blocks, stages)
            sizes = [end - first for first, end in bounds]
            assert [index for pair in bounds for index in range(*pair)] == list(range(blocks))
            assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1 and len(sizes) == stages
    assert cut_blocks(6, 3, (3, 1, 2)) == [(0, 3), (3, 4), (4, 6)]
    with pytest.raises(ValueError, match="4 pipeline stages for 3 blocks"):
        cut_blocks(3, 4)
    with pytest.raises(ValueError, match=r"stages=\(1, 2\) are 3 blocks, but the model has 4"):
        cut_blocks(4, 2, (1, 2))


STAGES = Stages(((0, 2), (2, 4), (4, 5)), (0, 1, 0), (0, 2), 1)


def test_where_modules_run():
    last = [STAGES.of(side) for side in (Side.BEFORE, Side.BETWEEN, Side.AFTER, Side.AROUND)]
    assert STAGES.last == 2 and last == [(0,), (1,), (2,), (0, 2)]
    assert [STAGES.here(side) for side in Side] == [1 not in STAGES.of(side) for side in Side]


def test_the_order_of_blocks():
    progress = Progress(STAGES, "blocks")
    for _ in range(2):  # a second pass is as the first
        for stage, right in ((0, [0, 1]), (1, [2, 3]), (2, [4])):
            progress.begin(stage)
            assert progress.place is Place.BEFORE and progress.bounds == STAGES.bounds[stage]
            for index in range(5):
                if index != right[0]:
                    with pytest.raises(ValueError, match=f"block {index} of 'blocks' runs first"):
                        progress.check_order(index)
            for index in right:
                progress.check_order(index)
                progress.enter_block(index)
            progress.check_order(right[-1] + 1)  # the stage is left there
            for index in {right[-1] + 2, right[-1] - 1, right[-1]}:
                with pytest.raises(ValueError, match=f"block {index} .* runs after block {right[-1]}"):
                    progress.check_order(index)
            assert [progress.is_behind(other) for other in range(3)] == [other < stage for other in range(3)]
            progress.end()
            with pytest.raises(ValueError, match="a part of it is called by itself"):
                progress.check_running()


def test_modules_on_the_wrong_side():
    progress = Progress(STAGES, "blocks")
    progress.begin(2)
    progress.check_side("tok", Side.BEFORE)
    with pytest.raises(ValueError, match="'head' is registered after .* called before"):
        progress.check_side("head", Side.AFTER)
    progress.enter_block(4)
    progress.check_side("head", Side.AFTER)
    progress.leave_blocks()
    for side, word in ((Side.BEFORE, "before"), (Side.BETWEEN, "between")):
        with pytest.raises(ValueError, match=f"'tok' is registered {word} .* but called after them"):
            progress.check_side("tok", side)
    progress.begin(0)
    progress.enter_block(1)
    for side, words in (
        (Side.AFTER, "after .* between them"),
        (Side.BETWEEN, "between .* before the second"),
    ):
        with pytest.raises(ValueError, match=f"'m' is registered {words}"):
            progress.check_side("m", side)


def pieces(**more):
    split = SimpleNamespace(
        **{"megatron": True, "is_whole": False, "leave": lambda out: ("left", out)} | more
    )
    return Pieces(split, "blocks", False, print)


def test_words_for_blocks_that_do_not_run_on_pieces():
    size = RuntimeError("The size of tensor a (3) must match the SIZE of tensor b (6)")
    found = pieces().explained(size, 1, in_block=True)
    assert (
        type(found) is ValueError
        and "block 1 of 'blocks' does not run" in str(found)
        and str(size) in str(found)
    )
    found = pieces().explained(size, 1, in_block=False)
    assert (
        type(found) is ValueError and "does not run behind block 1" in str(found) and str(size) in str(found)
    )

    class Other(RuntimeError):
        pass

    for error, at, how in (
        (size, None, {}),
        (size, 1, {"is_whole": True}),
        (RuntimeError("no"), 1, {}),
        (Other("size"), 1, {}),
    ):
        assert pieces(**how).explained(error, at, in_block=True) is error


def test_a_block_may_not_change_what_it_is_given_where_the_sequence_is_cut():
    def forward(kept, **more):
        return kept.append(GIVEN) or more.get("out")

    assert pieces().run("block 0", lambda x, out: out, [GIVEN], out=3) == 3
    with pytest.raises(ValueError, match="block 0 changes a list or dict"):
        pieces().run("block 0", forward, [GIVEN])
    assert pieces().leave(1) == ("left", 1) and pieces(megatron=False).leave(1) == 1


def test_what_is_marked_by_operations_says_where_it_comes_from():
    """At both levels, and in place."""
    absent = absent_like(torch.empty(2, 3, device="meta"), "block 7", "cpu")
    with torch._C.DisableTorchFunctionSubclass():
        low = [absent + 1, absent.view(3, 2), torch.ones(2, 3).mul_(absent), absent.argmax(1)]
    for made in (*low, absent + 1, absent.t()):
        assert isinstance(made, Absent) and made.origin == "block 7"


def test_a_module_without_a_tensor_is_not_guessed():
    def asks(*given):
        raise NotImplementedError("cannot be called on meta tensors")

    guessed = []
    for given in ((), (3,)):
        with pytest.raises(NotImplementedError, match="cannot be called on meta"):
            _or_guess(guessed, "experts", asks, *given, **{})
    assert _or_guess(guessed, "experts", asks, GIVEN).shape == GIVEN.shape and guessed == ["experts"]


def test_the_loss_of_single_steps_is_the_mean_of_their_means(monkeypatch):
    monkeypatch.setattr(pipedream_updates, "sum_losses", lambda losses, *where: sum(losses))
    made = PipeDreamUpdates({}, print, None, torch.device("cpu"), Options(None))
    for losses in ([3.0], [1.0, 2.0, 6.0]):
        made.begin(SimpleNamespace(start=list, check=list), 5.0, len(losses))
        assert made.end([torch.tensor(each) for each in losses]).loss.item() == 3.0


# --- what is looked at in front of a block --------------------


def test_a_module_is_watched_once_however_many_passes_there_are():
    """By name and block; what an aside has noted is forgotten with its modules' forwards."""
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)]
    plain = {(index, name): blocks[index].get_submodule(name).forward for index in (0, 2) for name in "01"}
    guessed = [{"", "0", "1"}, set(), {"1"}]
    shared = SimpleNamespace(tokens=list)
    templates = SimpleNamespace(shared=shared, guessed=guessed, of=lambda index, *given: f"template {index}")
    assumptions = Assumptions(SimpleNamespace(blocks=blocks, name="blocks"), templates, None)
    for _ in range(4):
        for index in range(3):
            assumptions.before(index, index == 0, torch.ones(1, 2), (), {})
            assert assumptions.template == f"template {index}"
    for (index, name), forward in plain.items():
        now = blocks[index].get_submodule(name).forward
        if name in guessed[index]:
            what, inner = now.args
            assert what == f"{name!r} of block {index} of 'blocks'" and inner == forward, now
        else:
            assert now == forward
    with assumptions.kept():
        guessed[1] = {"0"}
        assumptions.before(1, True, torch.ones(1, 2), (), {})
        assert (1, "0") in assumptions.looked_at
    assert (1, "0") not in assumptions.looked_at and (2, "1") in assumptions.looked_at
