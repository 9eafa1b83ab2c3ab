"""Parts of the command lines that all benchmarks share."""

import argparse
import textwrap
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

Add: TypeAlias = Callable[..., argparse.Action]  # parser.add_argument
W = TypeVar("W", bound=str)


def new_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """description: shown with the lines that it has, without what they are indented by."""
    return argparse.ArgumentParser(
        prog=prog,
        description=textwrap.dedent(description or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_place(add: Add, ranks_help: str = "processes (default %(default)s)") -> None:
    """Where the ranks are."""
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


def add_files(add: Add, plot: str, kinds: Iterable[str] = ("json", "markdown", "plot")) -> None:
    """Files of the report; plot: what the picture shows."""
    for kind in kinds:
        text = f"{plot}, a PNG or SVG" if kind == "plot" else f"write the tables as {kind}"
        add(f"--{kind}", metavar="FILE", help=text)


def chosen(text: str, allowed: Iterable[W], option: str) -> tuple[W, ...]:
    """A list with commas as a tuple without repetitions. Raises ValueError."""
    names, known = dict.fromkeys(name.strip() for name in text.split(",")), {word: word for word in allowed}
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name!r}: must be of {', '.join(known)}")
    return tuple(word for name in names for word in known if word == name)
