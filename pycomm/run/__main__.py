"""The command line of pycomm.run."""

import argparse
import sys
from collections.abc import Sequence

from pycomm.run.job import Job, Settings


def parse(arguments: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.run",
        description="Starts the ranks of a script on this host. Those that die are replaced, one by one, for "
        "scripts that go on without them (pycomm.parallel.resilient).",
    )
    parser.add_argument("--nproc", type=_positive, required=True, metavar="N", help="how many ranks")
    parser.add_argument(
        "--replacements",
        type=_count,
        default=3,
        metavar="N",
        help="how many processes may take the places of dead ones, in all; default 3",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = [*(["-m"] if options.module else []), options.script, *options.arguments]
    return Settings(options.nproc, options.replacements, command)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more")
    return number


def _positive(text: str) -> int:
    if _count(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(Job(parse(sys.argv[1:])).run())
