"""What a stage hands on to the next one: every tensor that the next block is given and cannot have there.

A stage does not end with its last block but where the forward calls the first block of the next stage. At
that call both sides hold the same arguments, in the same places; what is a value on the side that leaves is
a stand-in (absent.py) on the side that enters:

    stage 0 of 2                                          stage 1 of 2
    enc = encoder(source)      values                     absent
    h = embed(target)          values                     absent
    mask = f(target)           values                     values: made of the batch
    block 0(h, mask, enc)      h, bias: values            absent
    block 1(h, mask, enc, bias)
        call of block 1:       h    mask  enc  bias  -->  [h]  mask  [enc]  [bias]     [ ]: sent
        the forward is left                               the stand-ins of h, enc and bias are delivered
    block 2(h, mask, enc, bias)                           enc is the same object: it is delivered there, too

So nothing needs a name: encoder outputs, biases that one block makes for all, a hidden state that the model
changes between two blocks, connections that are given to every block. A stand-in that was delivered counts as
the tensor in whatever is computed with it until the pass ends.

Gradients: what was received is a leaf. A stage goes backward from all tensors that it has sent, with the
gradients that came for them. What it only passes on is such a leaf itself, so its gradient is what came back
from the later stages plus what its own blocks add: an encoder's output collects one term per block, going up
the chain, in one order. Tensors that are not floating have none. One that needs no gradient (a mask computed
from a frozen parameter) gets zeros back: the side that enters cannot know.

Which places those are, the entering stage finds without data (StageModel.shape_of_input) before its first
pass for inputs of some shape; it tells the stage before, once for each such shape:

    stage s     irecv (places) ............ needed when its first forward ends         cost: 8 PLACES bytes up
    stage s+1   run for shapes, isend                                                   per boundary, once

In its later runs for shapes, one per step, the entering stage finds the same places or raises. Cost of a step
per boundary and microbatch: the bytes of those tensors, each way. A model whose blocks are given one absent
tensor, as a decoder alone, sends what it sent before.

Refused with a ValueError: a block of a later stage, a module after the blocks or the loss that uses an absent
tensor which the first block of its stage was not given (a connection around some blocks only); several
tensors where the sequence is cut, too, for it is not known how each of them is cut.

The alternatives: to send the results of absent modules to where they are called would let each stage repeat
what the forward does with them, dropout included, which would then differ between stages. To send what is
alive would send a decoder's embeddings, which live in local variables.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from pycomm.parallel.given import Tree
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.leaves import leaves
from pycomm.parallel.pipeline.absent import Absent, Delivery, first_absent
from pycomm.parallel.pipeline.progress import Progress

__all__ = ["Agreement", "Deliveries", "Wanted", "absent_places", "taken"]

PLACES = 32  # how many tensors a stage can hand on
TAG = 1 << 30  # of what stage 0 would tell; above those of the executor
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Wanted(NamedTuple):
    """A tensor that the first block of a stage is to be handed."""

    place: int  # among the leaves of what the block is given
    shape: tuple[int, ...]
    dtype: torch.dtype


def absent_places(args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> list[tuple[int, Absent]]:
    """[(place, stand-in)] of what a block is given and has to be sent, each once."""
    found, seen = [], set()
    for place, leaf in enumerate(leaves((args, kwargs))):
        if isinstance(leaf, Absent) and not leaf.delivered and id(leaf) not in seen:
            seen.add(id(leaf))
            found.append((place, leaf))
    return found


def taken(
    args: Sequence[Tree], kwargs: Mapping[str, Tree], places: Sequence[int], block: str
) -> tuple[torch.Tensor, ...]:
    """The tensors at those places of a block's arguments. Raises ValueError where there are none."""
    given = leaves((args, kwargs))
    found: list[torch.Tensor] = []
    for place in places:
        tensor = given[place] if place < len(given) else None
        if isinstance(tensor, Absent):
            raise ValueError(
                f"{block}, of the next pipeline stage, is given a tensor of shape {tuple(tensor.shape)} that "
                f"comes from {tensor.origin}, which an earlier stage runs and did not hand on to this one: "
                "give it to all blocks, name another list with Plan(blocks=...), or use a plan with pp=1"
            )
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{block} is given other arguments than in its run for shapes: a {type(tensor).__name__} "
                "where a tensor was. Use a plan with pp=1"
            )
        found.append(tensor)
    return tuple(found)


class Deliveries:
    """What has taken the place of stand-ins in the pass that runs. progress: of that pass."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.made: list[Delivery] = []

    def deliver(
        self, places: list[tuple[int, Absent]], received: tuple[torch.Tensor, ...], block: str
    ) -> None:
        """places: absent_places() of a block. Raises ValueError where they do not fit what was received."""
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in received]
        asked = [(tuple(leaf.shape), leaf.dtype) for _, leaf in places]
        if [dtype for _, dtype in got] != [dtype for _, dtype in asked]:
            raise ValueError(
                f"{block} lacks other tensors than in its run for shapes: {asked}, and {got} was sent. The "
                "forward must do the same for equal shapes; or use a plan with pp=1"
            )
        for (_, leaf), tensor in zip(places, received, strict=True):
            self.made.append(leaf.deliver(tensor))

    def present(self, values: Tree) -> Tree:
        """values with what was delivered in its place; what was not stays as it is."""
        if first_absent(values) is None:
            return values
        return tree_map_only(Absent, lambda leaf: leaf.delivery.tensor if leaf.delivered else leaf, values)

    def check_present(self, values: Tree, what: str) -> Tree:
        """values with what was delivered. Raises ValueError for what is absent. what: who uses the values."""
        values = self.present(values)
        stages, stage = self.progress.stages, self.progress.stage
        absent = first_absent(values) if stages.last > 0 else None
        if absent is not None and stage == 0 and len(stages.mine) == 1:
            raise ValueError(
                f"{what} a tensor that comes from {absent.origin}, which is registered after the blocks of "
                f"{self.progress.name!r} but used before them: register it before them"
            )
        if absent is not None and stage == 0:
            raise ValueError(
                f"{what} a tensor that the model has kept from the pass of another stage on this rank. "
                "Choose a schedule with one stage on a rank (1f1b, gpipe, zb-h1), or use a plan with pp=1"
            )
        if absent is not None:
            raise ValueError(
                f"{what} a tensor of shape {tuple(absent.shape)} that comes from {absent.origin}, which an "
                f"earlier pipeline stage runs, not stage {stage} of {stages.last + 1}: a stage hands on "
                "what the first block of the next one is given. Give it to all blocks, compute it inside "
                "them, name another list with Plan(blocks=...), or use a plan with pp=1"
            )
        return values

    def end(self) -> None:
        """What is kept of a pass stands for nothing in the next one."""
        for delivery in self.made:
            delivery.end()
        self.made.clear()


class Agreement:
    """Which places each boundary hands on. placement: stage -> rank of pp."""

    def __init__(self, placement: Sequence[int]) -> None:
        self.placement = placement
        # (stage that enters, key of its inputs) -> places, or what will bring them
        self.known: dict[tuple[int, Hashable], tuple[int, ...] | _Coming] = {}

    def tell(
        self,
        inputs: Mapping[K, T],
        find: Callable[[int, T], Sequence[int]],
        group: comm.Group,
        device: torch.device,
    ) -> None:
        """Before a step or an evaluation, on all ranks of a pipeline alike.

        inputs: {key: what find is given for it}. find: (stage, that) -> its places. group: pp.
        """
        sent: list[tuple[torch.Tensor, comm.Work]] = []
        for key, given in inputs.items():
            for stage in range(1, len(self.placement)):
                before, here = self.placement[stage - 1], self.placement[stage]
                if (stage, key) in self.known or group.rank not in (before, here):
                    continue
                if here != group.rank:
                    self.known[stage, key] = _Coming(stage, here, group, device)
                    continue
                places = tuple(find(stage, given))
                if before != here:
                    message = torch.tensor([len(places), *_padded(stage, places)], device=device)
                    sent.append((message, comm.isend(message, before, group, tag=TAG + stage)))
                self.known[stage, key] = places
        for _, work in sent:
            work.wait()

    def places(self, stage: int, key: Hashable) -> tuple[int, ...]:
        """Those of what stage `stage` is handed."""
        found = self.known[stage, key]
        if isinstance(found, _Coming):
            found = self.known[stage, key] = found.places()
        return found


def _padded(stage: int, places: Sequence[int]) -> list[int]:
    if len(places) > PLACES:
        raise ValueError(
            f"the first block of pipeline stage {stage} is given {len(places)} tensors that earlier stages "
            f"compute; {PLACES} can be handed on. Give it one of all of them, or use a plan with pp=1"
        )
    return [*places, *[0] * (PLACES - len(places))]


class _Coming:
    """The places that a stage tells."""

    def __init__(self, stage: int, src: int, group: comm.Group, device: torch.device) -> None:
        self.buffer = torch.empty(PLACES + 1, dtype=torch.int64, device=device)
        self.work = comm.irecv(self.buffer, src, group, tag=TAG + stage)

    def places(self) -> tuple[int, ...]:
        self.work.wait()
        count, *places = self.buffer.tolist()
        return tuple(places[:count])
