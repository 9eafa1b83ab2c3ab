"""python -m pycomm.benchmarks: the command line. See --help."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {  # the first word -> the module whose main(arguments) runs; any other one: an operation
    "strategies": "strategies.command",
    "fused": "fused.command",
    "tune": "tune.command",
    "planned": "planned",
    "snapshots": "snapshots",
    "zero_memory": "zero_memory",
    "registered": "registered",
    "plot": "plot",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, 1 when a rank failed or a result was wrong, 2 without a
    GPU; argparse exits with 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    name = COMMANDS.get(arguments[0] if arguments else "", "collectives.command")
    command = importlib.import_module(f"pycomm.benchmarks.{name}")
    return command.main(arguments if name == "collectives.command" else arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
