"""Parts of the command lines that all benchmarks share."""

import argparse
import textwrap


def new_parser(prog, description):
    """description: shown with the lines that it has, without what they are indented by."""
    return argparse.ArgumentParser(
        prog=prog,
        description=textwrap.dedent(description),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_place(add, ranks_help="processes (default %(default)s)"):
    """add: parser.add_argument. Where the ranks are."""
    add("--ranks", type=int, default=2, help=ranks_help)
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where the data is (default %(default)s)")
    add(
        "--ranks-as",
        choices=("processes", "threads"),
        help="of pycomm (default: threads where ranks share a GPU, else processes)",
    )
    add(
        "--ranks-per-gpu",
        type=int,
        metavar="N",
        help="GPU of rank r is r // N (default: as few ranks per GPU as possible)",
    )


def add_files(add, plot, kinds=("json", "markdown", "plot")):
    """Files of the report; plot: what the picture shows."""
    for kind in kinds:
        text = f"{plot}, a PNG or SVG" if kind == "plot" else f"write the tables as {kind}"
        add(f"--{kind}", metavar="FILE", help=text)


def chosen(text, allowed, option):
    """A list with commas as a tuple without repetitions. Raises ValueError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in allowed:
            raise ValueError(f"{option} {name!r}: must be of {', '.join(allowed)}")
    return names
