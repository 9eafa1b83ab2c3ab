"""The matrix of values: which operation, algorithm, dtype, reduction, size and layout is tried. Pure, so it
is tested without a GPU.

A block is what shares one algorithm of one operation. In a block not everything is combined with everything,
which would be a hundred thousand cases: every dtype with every reduction at two sizes; every size with every
layout in f32; large sizes in three dtypes.
"""

from typing import NamedTuple

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
REDUCTIONS = {
    **dict.fromkeys(FLOATS, ("sum", "avg", "premul_sum", "product", "min", "max")),
    **dict.fromkeys(INTEGERS, ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")),
    "bool": ("band", "bor"),
    "complex64": ("sum",),
}
MOVED = (*FLOATS, *INTEGERS, "bool", "complex64", "complex128", "float8_e4m3fn")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
OPS = (*REDUCING, "broadcast", "all_gather", "all_to_all", "gather", "scatter", "send_recv")
ALGORITHMS = {
    "all_reduce": (None, "one_shot", "two_shot", "ring", "multimem"),
    "reduce": (None, "two_shot"),
    "reduce_scatter": (None, "two_shot"),
    "broadcast": (None, "two_shot", "copy_engine"),
    "all_gather": (None, "copy_engine"),
    "all_to_all": (None, "copy_engine"),
    "gather": (None, "copy_engine"),
    "scatter": (None, "copy_engine"),
    "send_recv": (None,),
}
LAYOUTS = (
    "plain",
    "offset",
    "strided",
)  # offset: one element beyond an aligned address; strided: every second element
IN_PLACE = ("all_reduce", "reduce")  # these have both forms
LARGE = ((1 << 20) + 3, (3 << 20) + 1)


class Case(NamedTuple):
    op: str
    algorithm: str | None
    dtype: str = "float32"
    redop: str = "sum"
    count: int = 1027  # of one chunk
    layout: str = "plain"
    in_place: bool = False
    root: int = 0
    random: bool = False  # values that round: compared within a tolerance, and bit by bit between the ranks

    def __str__(self):
        parts = [self.op, self.algorithm or "automatic", self.dtype]
        parts += [self.redop] if self.op in REDUCING else []
        parts += (
            [f"count={self.count}", self.layout] + ["in place"] * self.in_place + ["random"] * self.random
        )
        return " ".join(parts) + (f" root={self.root}" if self.root else "")


def sizes(n):
    return sorted({0, 1, max(0, n - 1), n, n + 1, 31, 1027, 65537})


def block(op, algorithm, n, whole):
    """The cases of one algorithm of one operation. whole=False: a quarter of them, for further world sizes
    and for processes.
    """
    reduces, make = (
        op in REDUCING,
        lambda **more: Case(op, algorithm, root=(n - 1) if op in ("reduce", "gather") else n // 2, **more),
    )
    cases = [make(count=count) for count in sizes(n)]
    cases += [
        make(count=count, layout=layout)
        for layout in LAYOUTS[1:]
        for count in (sizes(n) if whole else (1, n + 1, 1027))
    ]
    if op in IN_PLACE:
        cases += [
            make(count=count, layout=layout, in_place=True)
            for layout in LAYOUTS
            for count in (1, 1027, 65537)
        ]
    if reduces:
        kinds = [
            (dtype, redop)
            for dtype, redops in REDUCTIONS.items()
            for redop in (redops if whole else redops[:2])
        ]
        cases += [
            make(dtype=dtype, redop=redop, count=count)
            for dtype, redop in kinds
            for count in ((13, 4099) if whole else (1027,))
        ]
        cases += [make(dtype=dtype, count=count, random=True) for dtype in FLOATS for count in (1027, 65537)]
    else:
        cases += [make(dtype=dtype, count=count) for dtype in MOVED for count in (13, 4099)]
    large = (
        [(dtype, count) for dtype in ("float32", "bfloat16", "int8") for count in LARGE]
        if whole
        else [("float32", LARGE[0])]
    )
    parts = 1 if op in (*IN_PLACE, "broadcast", "send_recv") else n  # LARGE is the whole buffer
    cases += [make(dtype=dtype, count=count // parts) for dtype, count in large]
    return [
        case._replace(
            root=0
            if op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv")
            else case.root
        )
        for case in cases
    ]


def blocks(n, whole, algorithms=True):
    """[(title, cases)] of all operations; algorithms=False: only what the runtime chooses itself."""
    found = []
    for op in OPS if n > 1 else OPS[:-1]:  # nobody to send to
        for algorithm in ALGORITHMS[op] if algorithms else (None,):
            found.append((f"{op} {algorithm or 'automatic'}", block(op, algorithm, n, whole)))
    return found
