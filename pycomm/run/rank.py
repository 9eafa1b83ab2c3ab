"""What the process of a rank runs: the script, as python would. It ends when pycomm.run does, however that
ends: a launcher that was killed leaves no ranks.

    python -m pycomm.run.rank LAUNCHER script.py arguments
    python -m pycomm.run.rank LAUNCHER -m module arguments
"""

import ctypes
import os
import runpy
import signal
import sys

SET_DEATH_SIGNAL = 1  # of prctl


def main(launcher: int, *command: str) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != launcher:  # it has ended before that
        sys.exit(1)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
