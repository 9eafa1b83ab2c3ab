"""A plan says how many ranks each axis has and how each strategy is to work. It is data: printable,
comparable, parsed from one line.

    Plan(dp=2, tp=2, pp=2, zero=1)           Plan.parse("dp=2,tp=2,pp=2,zero=1")

Every function that users give a plan takes its text, too, and makes a Plan of it at once by Plan.of.

The number of ranks is the product of the axes. Outer to inner they are pp, dp, ep, ring, ulysses, tp, so that
the axis which talks most has the nearest ranks; zero adds no ranks, it cuts what the ranks of dp (and ep,
ring, ulysses) would hold several times.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from pycomm.parallel.data.compression import Compression

__all__ = [
    "AXES",
    "Axis",
    "CompressionName",
    "Offload",
    "Plan",
    "Precision",
    "Schedule",
    "ScheduleName",
    "Trust",
    "Zero",
    "ZeroGroup",
    "fields_of",
]

Axis: TypeAlias = Literal["pp", "dp", "ep", "ring", "ulysses", "tp"]
Zero: TypeAlias = Literal[0, 1, 2, 3]
ZeroGroup: TypeAlias = Literal["all", "host"]
GradSync: TypeAlias = Literal["all_reduce", "naive"]
CompressionName: TypeAlias = Literal["fp16", "bf16", "int8", "powersgd", "topk"]
Precision: TypeAlias = Literal["bf16"]
Offload: TypeAlias = Literal["optimizer", "parameters"]
Schedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "pipedream"]
Trust: TypeAlias = Literal["rows", "loss", "positions"]

AXES: tuple[Axis, ...] = get_args(Axis)
TRUSTED: tuple[Trust, ...] = get_args(Trust)
SINGLE = "single process"  # the text of Plan()


class ScheduleName(str, enum.Enum):
    """Pipeline schedules, see pipeline/schedules.py. Each equals its text, which is what users write."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZBV = "zbv"
    PIPEDREAM = "pipedream"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to run a model on many ranks. Plan() is a single process.

    Axes (numbers of ranks):
        dp: data parallel replicas. tp: tensor parallel ranks. pp: pipeline stages. ep: ranks among which the
        experts of MoE layers are dealt. ring, ulysses: sequence parallel ranks of ring attention and of
        Ulysses; both together are the hybrid.
    Data:
        zero: 0 (all replicated), 1 (optimizer state), 2 (and gradients), 3 (and parameters are sharded).
        zero_group: the ranks among which zero divides: "all" data ranks, or those of a "host", so that every
        host has a whole copy, and of what zero sends only the sums of gradients go from host to host.
        grad_sync: "all_reduce", or "naive": one rank gathers and broadcasts (needs zero=0).
        compression: None, "fp16", "bf16", "int8", "powersgd", "topk", or a factory as made by
        `data.compression.make_compression` (zero=0).
        bucket_mb: size of a gradient bucket in MB (1e6 bytes).
        precision: None keeps the model's dtypes; "bf16" computes in bfloat16 with fp32 master copies in the
        optimizer. Parameters and floating inputs are cast, buffers and targets are not; loss_fn is given the
        output in fp32.
        offload: None; "optimizer": optimizer state and master copies in host memory; "parameters": parameter
        shards too (needs zero=3).
    Model:
        megatron_sp: split norms and dropout along the sequence over tp.
        zigzag: with ring, deal the sequence so that causal attention is balanced.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zbv" or "pipedream"; chunks: stages per rank
        (interleaved: 2 if not given; zbv: 2). stages: number of blocks of each stage, first to last; None: as
        even as possible.
        checkpoint: recompute activations block by block.
        blocks: name of the ModuleList, Sequential or ModuleDict that holds the blocks; None: found (not a
        ModuleDict). Two names: the lists of an encoder and of a decoder, in the order in which they run.
        trust: what you answer for yourself, so that it is not tried: of "rows" (each row of a batch is
        computed from itself), "loss" (it is a mean over the targets that count), "positions" (a piece of a
        sequence gives what the whole gives). See docs/limits.md.
        rules: glob of module names -> tensor parallel rule, see `tensor/find.py`; wins over what is found.
    Checks:
        compare_every: None, or N: every N-th step first compares, to the bit, the parameters that several
        ranks hold (run/replicas.py).

    Raises ValueError, when made, for values that contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    ring: int = 1
    ulysses: int = 1
    zero: Zero = 0
    zero_group: ZeroGroup = "all"
    grad_sync: GradSync = "all_reduce"
    compression: CompressionName | Callable[[], Compression] | None = None
    bucket_mb: float = 25.0
    precision: Precision | None = None
    offload: Offload | None = None
    megatron_sp: bool = False
    zigzag: bool = True
    schedule: Schedule | ScheduleName = "1f1b"
    chunks: int | None = None
    stages: tuple[int, ...] | None = None
    checkpoint: bool = False
    blocks: str | tuple[str, str] | None = None
    rules: Mapping[str, str] | None = None
    trust: tuple[Trust, ...] = ()
    compare_every: int | None = None

    def __post_init__(self) -> None:
        for axis in AXES:
            value = getattr(self, axis)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"Plan({axis}={value!r}): the number of ranks of an axis is a whole number, 1 or more"
                )
        _one_of("zero", self.zero, get_args(Zero))
        _one_of("zero_group", self.zero_group, get_args(ZeroGroup))
        _one_of("schedule", self.schedule, get_args(Schedule))
        _one_of("grad_sync", self.grad_sync, get_args(GradSync))
        _one_of("precision", self.precision, (None, *get_args(Precision)))
        _one_of("offload", self.offload, (None, *get_args(Offload)))
        if not callable(self.compression):
            _one_of("compression", self.compression, (None, *get_args(CompressionName)))
        if not self.bucket_mb > 0:
            raise ValueError(f"Plan(bucket_mb={self.bucket_mb}): must be positive")
        object.__setattr__(self, "trust", (self.trust,) if isinstance(self.trust, str) else tuple(self.trust))
        for name in self.trust:
            _one_of("trust", name, TRUSTED)
        every = self.compare_every
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(
                f"Plan(compare_every={every!r}): the number of steps from one comparison to the next is a "
                "whole number, 1 or more, or None"
            )
        if self.stages is not None:
            object.__setattr__(self, "stages", tuple(self.stages))
        if self.blocks is not None and not isinstance(self.blocks, str):
            object.__setattr__(self, "blocks", tuple(self.blocks))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.zero and (self.compression or self.grad_sync == "naive"):
            what = f"compression={self.compression!r}" if self.compression else 'grad_sync="naive"'
            raise ValueError(
                f"Plan({what}, zero={self.zero}): both replace the all_reduce of whole gradients, which "
                "exists with zero=0 only"
            )
        if self.zero_group != "all" and not self.zero:
            raise ValueError(
                f"Plan(zero_group={self.zero_group!r}, zero=0): it says among which ranks zero divides, and "
                "zero=0 divides nothing: choose zero=1, 2 or 3"
            )
        if self.compression and self.grad_sync == "naive":
            raise ValueError(
                f'Plan(compression={self.compression!r}, grad_sync="naive"): choose one way to sum gradients'
            )
        if self.offload == "parameters" and self.zero != 3:
            raise ValueError(
                f'Plan(offload="parameters", zero={self.zero}): only zero=3 keeps parameters as shards that '
                "can lie elsewhere"
            )
        if self.chunks not in (None, self.chunks_per_rank):
            raise ValueError(
                f"Plan(chunks={self.chunks}, schedule={self.schedule!r}): this schedule has "
                f"{self.chunks_per_rank} per rank"
            )
        if self.schedule == ScheduleName.INTERLEAVED and self.chunks_per_rank < 1:
            raise ValueError(f"Plan(chunks={self.chunks}): at least one stage per rank")
        if self.stages is not None and (len(self.stages) != self.virtual_stages or min(self.stages) < 1):
            raise ValueError(
                f"Plan(stages={self.stages}): needs {self.virtual_stages} positive numbers (pp={self.pp} x "
                f"{self.chunks_per_rank} chunks)"
            )
        if self.schedule == ScheduleName.PIPEDREAM and (self.zero or self.precision or self.compression):
            raise ValueError(
                'Plan(schedule="pipedream"): keeps versions of whole parameters, so it needs zero=0 and '
                "neither precision nor compression"
            )

    @staticmethod
    def of(value: Plan | str | None) -> Plan:
        """The Plan that a caller gives: a Plan as it is, a text parsed, None as a single process.

        Raises ValueError for anything else.
        """
        if isinstance(value, Plan):
            return value
        if value is None:
            return Plan()
        if isinstance(value, str):
            return Plan.parse(value)
        raise ValueError(
            f"plan={value!r}: must be a Plan, such as Plan(dp=2, zero=1), or its text, such as "
            f'"dp=2,zero=1", not {type(value).__name__}'
        )

    @classmethod
    def parse(cls, text: str) -> Plan:
        """From "dp=2,tp=2,schedule=zbv,stages=3:2:2:1,megatron_sp": the fields by name; a name
        alone is True, and two lists of blocks are "blocks=encoder.block+decoder.block". "" and
        "single process" are Plan().
        """
        return cls(**fields_of(text))

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def chunks_per_rank(self) -> int:
        """Virtual stages per pipeline rank."""
        if self.schedule == ScheduleName.INTERLEAVED:
            return 2 if self.chunks is None else self.chunks
        return 2 if self.schedule == ScheduleName.ZBV else 1

    @property
    def cuts_sequence(self) -> bool:
        return self.ring > 1 or self.ulysses > 1 or (self.megatron_sp and self.tp > 1)

    @property
    def virtual_stages(self) -> int:
        return self.pp * self.chunks_per_rank if self.pp > 1 else 1

    def __str__(self) -> str:
        changed = [
            field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default
        ]
        return ",".join(f"{name}={_show(getattr(self, name))}" for name in changed) or SINGLE


def fields_of(text: str) -> dict[str, Any]:
    """{field: value} of the fields that the text of a Plan gives. Raises ValueError for other names."""
    values: dict[str, Any] = {}
    known = [field.name for field in dataclasses.fields(Plan) if field.name != "rules"]
    for item in filter(None, (part.strip() for part in text.split(",") if text != SINGLE)):
        name, given, value = (part.strip() for part in item.partition("="))
        if name not in known:
            raise ValueError(f"plan {text!r}: there is no {name!r}; known: {', '.join(known)}")
        if name in values:
            raise ValueError(f"plan {text!r}: {name} is given twice")
        values[name] = _parse_value(text, name, value if given else "true")
    return values


def _show(value: object) -> object:
    if not isinstance(value, tuple):
        return value
    return "+".join(value) if isinstance(value[0], str) else ":".join(map(str, value))


def _one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed or isinstance(value, bool):
        raise ValueError(f"Plan({name}={value!r}): must be one of {', '.join(map(repr, allowed))}")


def _parse_value(
    text: str, name: str, value: str
) -> str | int | float | bool | tuple[int, ...] | tuple[str, ...]:
    if name == "stages":
        if not re.fullmatch(r"\d+(:\d+)*", value):
            raise ValueError(
                f"plan {text!r}: stages={value!r} must be numbers of blocks joined by colons, as 3:2:2"
            )
        return tuple(int(part) for part in value.split(":"))
    if name == "trust":
        return tuple(value.split("+"))
    if name == "blocks":
        return tuple(value.split("+")) if "+" in value else value
    if re.fullmatch(r"-?\d+", value):
        return int(value)
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if name == "bucket_mb" and re.fullmatch(r"\d*\.\d+(e-?\d+)?|\d+e-?\d+", value):
        return float(value)
    if name == "bucket_mb":
        raise ValueError(f"plan {text!r}: bucket_mb={value!r} is not a number")
    if name in AXES or name in ("zero", "chunks", "compare_every"):
        raise ValueError(f"plan {text!r}: {name}={value!r} is not a whole number")
    return value
