"""Runs this rank's part of a schedule: calls the stages in order and moves activations and gradients between
ranks.

    rank 0   F(0, i) --- y, "F" of stage 0 ---> F(1, i)   rank 1
             B(0, i) <-- dx, "B" of stage 1 --- B(1, i)

Per microbatch and boundary there is one message of the size of y each way. Stages of one rank that follow
each other (the turn of a V, pp = 1) hand the tensor over; nothing is sent. A stage may hand on several
tensors (handover.py): then a message has as many parts, sent one after the other, and the one that comes back
has a part for each floating tensor.

[Note: order of messages] A large send is done when its recv has come (docs/decisions/0028), and on CUDA the
messages of two ranks match in order of issue. So ranks that issue theirs in different orders could wait for
each other. Therefore all messages of a step have one order, the same on all ranks: that of the times at which
the passes that make them end, when every pass takes one unit of time. Each rank issues its sends and recvs in
that order. It never has to wait for a later pass to do so: a send that precedes recv k was made by a pass
that ended before k was made, hence before k can be used here. By induction over the order every message finds
its other side, even on a backend that handles one message at a time, for every schedule without deadlock.
(To post each recv only when it is needed would deadlock such a backend already with 1F1B, where two
neighbours send to each other at once.)

Which recv is posted before which pass follows from the schedule and is computed once (plan_steps). Recvs are
posted AHEAD passes before their use, so that the transfer has the time of those passes; earlier would only
hold more buffers. A tensor that was sent is kept until its send is waited for. That is done where it cannot
block: when a message has come that the receiver made after it had used ours. What is left then, at most the
last gradients, is waited for at the end. Held at once, beside what the stages keep: with 1F1B at most pp sent
gradients per stage, with GPipe all m of them.

Errors: what a stage raises is passed on at once. The other ranks find this one missing, by the death of its
process or by the time limit of the group (ground/last_words.py has what it raised). Each message has its
number as tag, so that ranks with different schedules do not match silently.
"""

import functools
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import torch

from pycomm.parallel.ground import comm
from pycomm.parallel.pipeline.schedules import UNIT, Action, Schedule, play, validate

__all__ = ["Handed", "Message", "StageOps", "Step", "plan_steps", "run"]

# Passes between the posting of a recv and its use. 1 would hide a transfer behind one pass, maybe a short W.
AHEAD = 2
# Part p of message n has the tag n + (p << TAG_BITS).
TAG_BITS = 20


# What stages hand on, X, and the gradients that come back, G; in a tuple what is not floating has None.
X = TypeVar("X", bound=torch.Tensor | tuple[torch.Tensor, ...])
G = TypeVar("G", bound=torch.Tensor | tuple[torch.Tensor | None, ...])
Parts: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...]  # either


class Handed(NamedTuple):
    """A tensor that is to come."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


class StageOps(Protocol[X, G]):
    """What run() asks of the stages of a rank. `stage` is a virtual stage of this rank; x and y are of any
    shape and floating dtype. dy is as y, dx as x.
    """

    def forward(self, stage: int, microbatch: int, x: X | None) -> X | None:
        """y. x is None for the first stage of the model and has no history; the last stage returns None and
        keeps the loss.
        """

    def backward(self, stage: int, microbatch: int, dy: G | None) -> G | None:
        """The gradient of x. dy has shape and dtype of y, and is None for the last stage; the first returns
        None.
        """

    def weight(self, stage: int, microbatch: int) -> None:
        """The gradients of the weights that backward() left out."""

    def update(self, stage: int, microbatch: int) -> None:
        """One step of the optimizer of this stage, with the gradients of this microbatch. PipeDream only."""

    def input_like(self, stage: int, microbatch: int) -> Handed | list[Handed]:
        """Of the x that forward() will get; a list for a tuple."""


class Message(NamedTuple):
    """made by `source` on rank src, used by `target` on rank dst. number: its place in the order of all, its
    tag.
    """

    number: int
    source: Action
    target: Action
    src: int
    dst: int


class Step(NamedTuple):
    """One action with what moves around it, in this order.

    receives: recvs to post before it. takes: the message that it waits for. settles: sends of ours that have
    certainly arrived when `takes` has. sends: the message that it makes. hands: the action on this rank that
    gets its result directly.
    """

    action: Action
    receives: tuple[Message, ...]
    takes: Message | None
    settles: tuple[Message, ...]
    sends: Message | None
    hands: Action | None


def _target(schedule: Schedule, action: Action) -> Action | None:
    """The action that uses the tensor made by `action`, or None."""
    kind, stage, microbatch = action
    if kind == "F" and stage < schedule.num_stages - 1:
        return Action("F", stage + 1, microbatch)
    if kind == "B" and stage > 0:
        return Action("B", stage - 1, microbatch)
    return None


def _ordered_messages(schedule: Schedule) -> list[Message]:
    """All messages between ranks, in the order in which every rank issues its own."""
    found = []
    for rank, (row, spans) in enumerate(zip(schedule.actions, play(schedule, UNIT), strict=True)):
        for action, (_, end) in zip(row, spans, strict=True):
            target = _target(schedule, action)
            if target is not None and schedule.placement[target.stage] != rank:
                found.append((end, action, target, rank, schedule.placement[target.stage]))
    return [
        Message(number, source, target, src, dst)
        for number, (_, source, target, src, dst) in enumerate(sorted(found))
    ]


@functools.lru_cache(maxsize=64)
def plan_steps(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The Steps of a rank: its actions with the messages around them. Raises ValueError for a schedule that
    is not valid.
    """
    validate(schedule)
    messages = _ordered_messages(schedule)
    places = {action: place for row in schedule.actions for place, action in enumerate(row)}
    queue = [message for message in messages if rank in (message.src, message.dst)]
    outgoing = {message.source: message for message in queue if message.src == rank}
    incoming = {message.target: message for message in queue if message.dst == rank}
    unsettled, issued, steps = list(outgoing.values()), 0, []
    for place, action in enumerate(schedule.actions[rank]):
        sends, takes = outgoing.get(action), incoming.get(action)
        due = [
            n
            for n, m in enumerate(queue)
            if m is sends or (m.dst == rank and places[m.target] <= place + AHEAD)
        ]
        receives = []
        while issued <= max(due, default=-1) and queue[issued].dst == rank:
            receives.append(queue[issued])
            issued += 1
        if sends is not None:
            assert queue[issued] is sends, f"rank {rank}: {queue[issued]} precedes {sends}"
            issued += 1
        settles = [
            m for m in unsettled if takes and m.dst == takes.src and places[m.target] <= places[takes.source]
        ]
        unsettled = [m for m in unsettled if m not in settles]
        target = _target(schedule, action)
        hands = target if target is not None and sends is None else None
        steps.append(Step(action, tuple(receives), takes, tuple(settles), sends, hands))
    return tuple(steps)


class _Mail(Generic[X, G]):
    """The tensors on their way to and from this rank during one run."""

    def __init__(self, rank: int, group: comm.Group, stage_ops: StageOps[X, G]) -> None:
        self.rank, self.group, self.stage_ops = rank, group, stage_ops
        self.receiving: dict[Message, tuple[Parts, list[comm.Work]]] = {}
        self.sending: dict[Message, tuple[Parts, list[comm.Work]]] = {}
        self.handed: dict[Action, Parts] = {}  # to the action
        # (stage, microbatch) -> what input_like() says, of the y that was sent
        self.like: dict[tuple[int, int], Handed | list[Handed | None]] = {}

    def post(self, message: Message) -> None:
        kind, stage, microbatch = message.target
        like: Handed | list[Handed] | list[Handed | None] = (
            self.stage_ops.input_like(stage, microbatch)
            if kind == "F"
            else self.like.pop((stage, microbatch))
        )
        buffer: Parts
        if isinstance(like, tuple):
            buffer = _empty(like)
        else:
            buffer = tuple(None if part is None else _empty(part) for part in like)
        works = [
            comm.irecv(part, message.src, self.group, tag=message.number + (place << TAG_BITS))
            for place, part in _parts(buffer)
        ]
        self.receiving[message] = buffer, works

    def take(self, step: Step) -> Parts | None:
        if step.takes is None:
            return self.handed.pop(step.action, None)
        buffer, works = self.receiving.pop(step.takes)
        for work in works:
            work.wait()
        for message in step.settles:
            self.settle(message)
        return buffer

    def settle(self, message: Message) -> None:
        _, works = self.sending.pop(message)
        for work in works:
            work.wait()

    def give(self, step: Step, tensor: Parts | None) -> None:
        message = step.sends
        target = step.hands if message is None else message.target
        if target is None:
            return
        kind, stage, microbatch = step.action
        if tensor is None:
            raise ValueError(
                f"[rank {self.rank}/{self.group.size}] stage {stage} returned None from "
                f"{'forward' if kind == 'F' else 'backward'} of "
                f"microbatch {microbatch}, but stage {target.stage} needs it; only the ends of the model "
                "return None"
            )
        given: Parts
        if isinstance(tensor, torch.Tensor):
            given = _plain(tensor)
        else:
            given = tuple(None if part is None else _plain(part) for part in tensor)
        if message is None:
            self.handed[target] = given
            return
        if kind == "F":
            self.like[stage, microbatch] = _likes_of(given)
        works = [
            comm.isend(part, message.dst, self.group, tag=message.number + (place << TAG_BITS))
            for place, part in _parts(given)
        ]
        self.sending[message] = given, works


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _empty(like: Handed) -> torch.Tensor:
    shape, dtype, device = like
    return torch.empty(shape, dtype=dtype, device=device)


def _likes_of(tensor: Parts) -> Handed | list[Handed | None]:
    """Of the gradient that comes back for what was sent."""
    if isinstance(tensor, torch.Tensor):
        return Handed(tensor.shape, tensor.dtype, tensor.device)
    return [
        Handed(part.shape, part.dtype, part.device) if part is not None and part.is_floating_point() else None
        for part in tensor
    ]


def _parts(tensor: Parts) -> list[tuple[int, torch.Tensor]]:
    """(place, tensor) of what is sent of a tensor or a tuple."""
    parts = (tensor,) if isinstance(tensor, torch.Tensor) else tensor
    return [(place, part) for place, part in enumerate(parts) if part is not None]


def run(schedule: Schedule, rank: int, group: comm.Group, stage_ops: StageOps[X, G]) -> None:
    """Executes the actions of `rank` with the StageOps of this rank; collective over the group, whose rank r
    is rank r of the schedule.

    group: comm.Group of the pp axis, of size schedule.pp. Returns nothing: what is wanted of a step the
    stages keep. All messages have been sent and received when it returns. Raises ValueError for a group that
    does not fit, and what the stages and the backend raise.
    """
    if (group.size, group.rank) != (schedule.pp, rank):
        raise ValueError(
            f"[rank {group.rank}/{group.size}] schedule {schedule.name!r} is for pp={schedule.pp} and was "
            f"asked for rank {rank}; group "
            f"{group.name!r} has {group.size} ranks and this is rank {group.rank}. Make the schedule with "
            f"pp={group.size}."
        )
    mail = _Mail(rank, group, stage_ops)
    for step in plan_steps(schedule, rank):
        for message in step.receives:
            mail.post(message)
        kind, stage, microbatch = step.action
        if kind == "F":
            mail.give(step, stage_ops.forward(stage, microbatch, cast("X | None", mail.take(step))))
        elif kind == "B":
            mail.give(step, stage_ops.backward(stage, microbatch, cast("G | None", mail.take(step))))
        elif kind == "W":
            stage_ops.weight(stage, microbatch)
        else:
            stage_ops.update(stage, microbatch)
    for message in list(mail.sending):
        mail.settle(message)
