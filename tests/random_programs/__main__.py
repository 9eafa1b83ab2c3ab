"""python tests/random_programs SEED: see --help."""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main():
    from random_programs.program import draw
    from random_programs.run import LIMIT, run
    from random_programs.search import FAULTS, command, keep_only, search, shrink

    parser = argparse.ArgumentParser(prog="python tests/random_programs", description=__doc__)
    parser.add_argument("seed", type=int, help="of the program, or of the first one")
    parser.add_argument("--fault", choices=FAULTS, help="default: none; with --programs, in turn")
    parser.add_argument("--programs", type=int, metavar="N", help="this and the following seeds")
    parser.add_argument("--seconds", type=float, help="begin no program after this time")
    parser.add_argument("--failures", type=int, default=1, help="with --programs: stop after so many (1)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="one seed: run it up to N times")
    parser.add_argument("--limit", type=float, default=LIMIT, help="one seed: seconds until it hangs")
    parser.add_argument("--keep", help="only these operations, numbers with commas between them")
    parser.add_argument("--hosts", type=int, default=1, help="simulated, for processes in turn (1)")
    parser.add_argument("--show", action="store_true", help="print the program")
    parser.add_argument("--shrink", action="store_true", help="leave out what a failure does not need")
    args = parser.parse_args()
    if args.programs:
        options = {"seconds": args.seconds, "stop_at": args.failures, "hosts": args.hosts}
        totals = search(args.seed, args.programs, fault=args.fault, **options)
        print(totals)
        return bool(totals.failed)
    fault = args.fault or "none"
    program = draw(args.seed, fault, args.hosts)
    if args.keep:
        program = keep_only(program, map(int, args.keep.split(",")))
    if args.show:
        print(program.processes, program.options, f"cma={program.cma}", program.fault)
        print(*program.groups, *program.operations, sep="\n")
    if args.shrink:
        left = shrink(program, tries=args.repeat, limit=args.limit)
        print(command(args.seed, fault, left, args.hosts))
        return 1
    for _ in range(args.repeat):
        outcome = run(program, args.limit)
        if outcome.failures:
            print(*outcome.failures, sep="\n")
            return 1
    print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
