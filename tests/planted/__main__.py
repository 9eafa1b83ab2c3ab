"""python tests/planted COMMAND: see --help, and tests/README.md."""

import argparse
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/planted", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="which tests reach which lines")
    record.add_argument("tests", nargs="*", help="these alone, which replace what was known of them")
    record.add_argument("--native", action="store_true", help="which reach which faults of csrc/; builds it")
    run = commands.add_parser("run", help="plant faults, and see whether a quick test fails")
    run.add_argument("names", nargs="*", help="parts of names of faults, or of their files; all if none")
    run.add_argument("--missed", action="store_true", help="only those that were missed when last tried")
    run.add_argument("--new", action="store_true", help="only those that were never tried")
    run.add_argument("--limit", type=float, default=60, help="seconds of tests for a fault (60)")
    run.add_argument("--workers", type=int, default=2)
    run.add_argument("--tests-of", default="", metavar="COMMIT", help="the tests as they were then")
    run.add_argument("--first", nargs="*", default=(), metavar="TEST", help="these before the others")
    attempt = commands.add_parser("try", help="plant one fault and run these tests, cases too")
    attempt.add_argument("name")
    attempt.add_argument("tests", nargs="+")
    draw = commands.add_parser("draw", help="write faults of a folder that operators find")
    draw.add_argument("folder")
    draw.add_argument("number", type=int)
    draw.add_argument("--seed", type=int, default=1)
    replay = commands.add_parser("replay", help="run the test that caught each of some")
    replay.add_argument("number", type=int)
    replay.add_argument("--seed", type=int, default=1)
    commands.add_parser("table", help="caught, missed, changes nothing by folder")
    arguments = parser.parse_args()
    return COMMANDS[arguments.command](arguments)


def do_record(arguments: argparse.Namespace) -> int:
    from planted import recording

    return recording.record(arguments.tests, native_too=arguments.native)


def do_run(arguments: argparse.Namespace) -> int:
    from planted import campaign, fault, results

    faults = fault.load()
    last = results.latest(results.read(), faults)
    chosen = [
        one
        for one in faults.values()
        if not one.changes_nothing
        and (not arguments.names or any(part in one.name or part in one.file for part in arguments.names))
        and (not arguments.missed or (one.name in last and last[one.name].verdict == "missed"))
        and (not arguments.new or one.name not in last)
    ]
    how = campaign.How(arguments.limit, arguments.tests_of, arguments.first)
    return campaign.run(chosen, how, arguments.workers)


def do_try(arguments: argparse.Namespace) -> int:
    from planted import campaign, fault

    found = [one for one in fault.load().values() if arguments.name in one.name]
    if len(found) != 1:
        print(
            f"{len(found)} faults have {arguments.name!r} in their names: {[one.name for one in found][:5]}"
        )
        return 2
    outcome = campaign.attempt(found[0], arguments.tests)
    print(outcome.text)
    print(f"caught by {outcome.caught}" if outcome.caught else f"missed by {outcome.tried} tests")
    return not outcome.caught


def do_draw(arguments: argparse.Namespace) -> int:
    from planted import fault, operators

    drawn = operators.draw(arguments.folder, arguments.number, arguments.seed)
    name = f"{fault.MACHINE}{arguments.folder.replace('/', '_')}.toml"
    (fault.DATA / name).write_text(operators.as_toml(drawn))
    print(f"{len(drawn)} faults in {name}")
    return 0


def do_replay(arguments: argparse.Namespace) -> int:
    """One test each, and only those in Python: the others need a build."""
    from planted import campaign, fault, results

    faults = fault.load()
    lost = fault.without_place(faults.values())
    caught = [
        (faults[result.fault], result.detail)
        for result in results.latest(results.read(), faults).values()
        if result.verdict == "caught" and faults[result.fault].is_python and result.fault not in lost
    ]
    missed = 0
    for one, test in random.Random(arguments.seed).sample(
        sorted(caught, key=lambda pair: pair[0].name), arguments.number
    ):
        outcome = campaign.attempt(one, [test])
        print(f"{'caught' if outcome.caught else 'MISSED'}  {one.name}  by  {test}", flush=True)
        missed += not outcome.caught
    return missed > 0


def do_table(arguments: argparse.Namespace) -> int:
    from planted import fault, results

    print(results.table(fault.load(), results.read()))
    return 0


COMMANDS = {
    "record": do_record,
    "run": do_run,
    "try": do_try,
    "draw": do_draw,
    "replay": do_replay,
    "table": do_table,
}

if __name__ == "__main__":
    sys.exit(main())
