"""The command: see the head of the package."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from typing import TYPE_CHECKING

from pycomm import env
from pycomm.doctor import checks, facts, ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if something makes pycomm unusable here, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.doctor",
        description="Says what is slow or missing for pycomm on this machine, and how to mend it.",
        epilog="Under torchrun all ranks are asked and rank 0 prints.",
    )
    parser.add_argument("--json", action="store_true", help="findings and facts as JSON")
    given = parser.parse_args(arguments)
    if env.launched():
        asked = ranks.ask_all()
        if asked is None:
            return 0  # rank 0 speaks for all
        answers, silent = asked
    else:
        group = facts.try_two_ranks()  # forks, so before CUDA is asked for its GPUs
        answers, silent = [dataclasses.replace(facts.gather(), group=group)], []
    findings = checks.judge(answers, silent)
    usable = not any(finding.fatal for finding in findings)
    if given.json:
        print(
            json.dumps({"usable": usable, "findings": as_json(findings), "facts": as_json(answers)}, indent=1)
        )
    else:
        print(as_text(findings, usable))
    return 0 if usable else 1


def as_json(records: Sequence[checks.Finding] | Sequence[facts.Facts]) -> list[ranks.Record]:
    return [dataclasses.asdict(record) for record in records]


def as_text(findings: Sequence[checks.Finding], usable: bool) -> str:
    lines: list[str] = []
    for finding in findings:
        start = f"{finding.state.value:9}{finding.name:18}"
        lines += textwrap.wrap(start + finding.found, WIDTH, subsequent_indent=" " * 27)
        if finding.mend:
            lines += textwrap.wrap(finding.mend, WIDTH, initial_indent=" " * 27, subsequent_indent=" " * 27)
    return "\n".join([*lines, "", "pycomm can be used here." if usable else "pycomm cannot be used here."])


if __name__ == "__main__":
    sys.exit(main())
