"""python tests/gpu one NAME RECORDS [--device cpu] [--seconds S]: one check, in a process that nothing else
depends on.
"""

import argparse
import os
import sys

import torch

from gpu.checks import CHECKS
from gpu.ranks import Check


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python tests/gpu one", description=__doc__)
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("records", help="file to which the records are appended")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, help="its limit")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the host only compares; its threads would take the cores of the ranks
    chosen = CHECKS[given.name]
    check = Check(given.name, given.records, on=given.device, seconds=given.seconds or chosen.seconds)
    check.go_through(chosen.run)
    return 1 if check.failed else 0


def run_and_leave(arguments):
    """Ends the process at once: a rank that hangs must not keep it."""
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
