"""Pictures from the JSON of a run: python -m pycomm.benchmarks plot RESULTS.json PICTURE.png"""

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pycomm.benchmarks.common import report

COLUMNS = {  # kind of a report -> the module whose page(content) and draw(content, pyplot) show it
    "collectives": "pycomm.benchmarks.collectives.columns",
    "fused": "pycomm.benchmarks.fused.columns",
    "planned": "pycomm.benchmarks.planned",
    "strategies": "pycomm.benchmarks.strategies.columns",
    "zero_memory": "pycomm.benchmarks.zero_memory",
}


def columns_of(content: report.Content) -> report.Columns:
    return cast(report.Columns, importlib.import_module(COLUMNS[content["kind"]]))


def main(arguments: Sequence[str]) -> int:
    """The sub-command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pycomm.benchmarks plot", description=__doc__)
    parser.add_argument("results", help="what --json of a benchmark has written")
    parser.add_argument("picture", help="a PNG or SVG")
    given = parser.parse_args(arguments)
    content = json.loads(Path(given.results).read_text())
    report.draw(content, columns_of(content).draw, given.picture)
    return 0
