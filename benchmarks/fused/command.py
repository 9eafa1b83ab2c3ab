"""python -m pycomm.benchmarks fused: the command line. See --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pycomm import env
from pycomm.benchmarks.common import device as gpu
from pycomm.benchmarks.common import report
from pycomm.benchmarks.common.options import add_files, add_place, chosen, new_parser
from pycomm.benchmarks.common.ranks import RankError
from pycomm.benchmarks.fused.cases import BARE, DTYPES, EPILOGUES, OPS, Case, parse_shapes

if TYPE_CHECKING:
    import argparse

    from pycomm.benchmarks.fused.columns import Results

SHAPES = {"cpu": "64x1024x1024,512x1024x1024,4096x1024x1024", "cuda": "512x8192x1024,8192x8192x1024"}
DESCRIPTION = """\
pycomm.fused beside a product and a collective one after the other, in turns, in one run; results are checked.
matmul runs on one rank.

  python -m pycomm.benchmarks fused --op all_gather_matmul --shapes 64x2048x2048,4096x2048x2048
  python -m pycomm.benchmarks fused --op matmul --device cuda --shapes 8192x8192x8192 --dtype bf16
  python -m pycomm.benchmarks fused --device cuda --ranks 8 --ranks-per-gpu 8 --graph

variants
  plain           product, collective, bias, activation, as torch.matmul and pycomm's collectives do them:
                  what the ratios refer to
  torch, gloo     the same over Gloo; with a GPU for each rank over NCCL
  chunked, fused  forms of pycomm.fused, forced; the second one on CUDA
  pycomm.fused    the public function, with the form it chooses
  symm_mem        torch.ops.symm_mem.fused_*, with a GPU for each rank
  addmm_act       torch._addmm_activation, of matmul on CUDA

With --backward a call is forward and backward; the forced forms are left out then: PYCOMM_FUSED=chunked|fused
forces pycomm.fused itself.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status: 0; 1 when a rank failed, a result is wrong or not all was
    measured; 2 without a GPU.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        env.allow_thread_ranks()
        if missing := gpu.why_no_cuda():
            print(f"error: --device cuda: {missing}.", file=sys.stderr)
            return 2
    elif missing := gpu.why_no_torch():
        print(f"error: {missing}.", file=sys.stderr)
        return 1
    try:
        cases = make_cases(options)
        results = run(cases, options)
    except ValueError as error:
        parser.error(str(error))
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return show(results, options)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("python -m pycomm.benchmarks fused", DESCRIPTION)
    add, default = parser.add_argument, "(default %(default)s)"
    add("--op", default=",".join(OPS), help="with commas (default: all)")
    add("--shapes", help="MxNxK of one rank's product, with commas (default: some)")
    add("--dtype", help=f"of {', '.join(DTYPES)}, with commas (default f32; with CUDA bf16)")
    bias = f"{BARE} has no bias, the others have"
    add("--activation", default="gelu_tanh", help=f"of {', '.join(EPILOGUES)}: {bias} {default}")
    add_place(add, f"of the collectives {default}")
    add("--backward", action="store_true", help="time forward and backward")
    add("--graph", action="store_true", help="time replays of a CUDA graph")
    add("--rounds", type=int, default=5, help=f"turns of each variant {default}")
    add("--seconds", type=float, default=0.2, help=f"of measuring in a turn {default}")
    add("--limit", type=float, default=3600, help=f"no case is begun after so many seconds {default}")
    late = "seconds of one operation whose peers do not come"
    add("--timeout", type=float, default=30, help=f"{late} {default}")
    add_files(add, "times faster")
    return parser


def make_cases(options: argparse.Namespace) -> list[Case]:
    """Checks the options, completes them, and returns the cases. Raises ValueError."""
    cuda = options.device == "cuda"
    ops = chosen(options.op, OPS, "--op")
    dtypes = chosen(options.dtype or ("bf16" if cuda else "f32"), DTYPES, "--dtype")
    epilogues = chosen(options.activation, EPILOGUES, "--activation")
    shapes = parse_shapes(options.shapes or SHAPES[options.device])
    if options.rounds < 1 or not min(options.seconds, options.limit, options.timeout) > 0:
        raise ValueError("--rounds must be 1 or more, --seconds, --limit and --timeout above 0")
    if ops != ("matmul",) and options.ranks < 2:
        raise ValueError(f"--ranks {options.ranks}: collectives need 2 or more")
    if not cuda and (options.graph or options.ranks_per_gpu is not None):
        raise ValueError("--graph and --ranks-per-gpu need --device cuda")
    if options.graph and options.backward:
        raise ValueError("--graph: the forward pass alone")
    if options.backward and "relu" in epilogues:
        raise ValueError(
            "--backward --activation relu: its gradient jumps at 0, where rounding decides, so no result "
            "could be checked"
        )
    cases = [
        Case(op, shape.m, shape.n, shape.k, dtype, epilogue)
        for op in ops
        for shape in shapes
        for dtype in dtypes
        for epilogue in epilogues
    ]
    for case in cases:
        if case.m % case.world_size(options.ranks):
            raise ValueError(
                f"--shapes {case.shape}: M must be a multiple of --ranks {options.ranks}, as torch's "
                "collectives want it"
            )
    options.per_gpu = (
        gpu.ranks_per_gpu(options.ranks, gpu.count_devices(), options.ranks_per_gpu) if cuda else 1
    )
    options.ranks_as = options.ranks_as or ("threads" if cuda and options.per_gpu > 1 else "processes")
    return cases


def run(cases: Sequence[Case], options: argparse.Namespace) -> Results:
    """Raises RankError."""
    import torch  # the message that there is none comes before this

    from pycomm.benchmarks.fused import columns, measure, peers

    torch.set_num_threads(1)  # in this process, too: its threads would not outlive a fork
    everything = options.limit + 2 * options.timeout
    place = peers.Place(options.ranks_as, options.device, options.per_gpu, options.timeout, everything)
    settings = measure.Settings(
        options.rounds, options.seconds, options.limit, options.backward, options.graph
    )
    load, rows, stopped = os.getloadavg()[0], list[report.Content](), ""
    for world_size in sorted({case.world_size(options.ranks) for case in cases}):
        mine = [case for case in cases if case.world_size(options.ranks) == world_size]
        by_rank = peers.run(world_size, place, measure.measure_cases, mine, settings)
        found, why = columns.merge(mine, world_size, by_rank, products=3 if options.backward else 1)
        rows, stopped = rows + found, stopped or why
    cores = len(os.sched_getaffinity(0))
    said = f"load average when it began: {load:.1f}, {cores} cores"
    said += ": other work distorts these figures" * (load > cores / 2)
    return columns.Results(rows, [said], stopped)


def show(results: Results, options: argparse.Namespace) -> int:
    from pycomm.benchmarks.fused import columns

    content = columns.make_report(results, options)
    report.write(content, options, columns.page, columns.draw)
    print(*report.markdown(content, columns.page(content)), sep="\n")
    wrong = [
        f"{columns.title_of(row)}, {row['variant']}: {row['error']:.1e}"
        for row in results.rows
        if row["missing"] is None and row["wrong"]
    ]
    if wrong:
        print("error: results differ from the exact ones:", *wrong, sep="\n", file=sys.stderr)
    if results.stopped:
        print(f"error: {results.stopped}", file=sys.stderr)
    return 1 if wrong or results.stopped else 0
