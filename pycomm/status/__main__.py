"""python -m pycomm.status: groups, ranks, what each is in, for how long, and whom it waits for."""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from pycomm.status.pages import Place, Refused, read_places

STACK_SECONDS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pycomm.status", description=__doc__)
    parser.add_argument("--pid", type=int, help="only the groups of this process")
    parser.add_argument(
        "--stacks",
        choices=("late", "all", "none"),
        default="late",
        help="whose Python stack "
        "is shown, by py-spy: of ranks that others wait for (default), of all, of none",
    )
    options = parser.parse_args(arguments)
    try:
        places = read_places(options.pid)
    except Refused as error:
        print(f"pycomm.status: {error}", file=sys.stderr)
        return 1
    if not places:
        print("No process of this user on this host is in a group of pycomm's whose ranks are processes.")
        return 0
    groups: dict[tuple[int, str], list[Place]] = {}
    for place in places:
        groups.setdefault((place.file, place.group), []).append(place)
    late: set[int] = set()
    for (_, name), members in groups.items():
        print("\n".join(describe(name, sorted(members, key=lambda place: place.rank))))
        late |= {place.pid for place in not_arrived(members)}
    shown = {"late": late, "all": {place.pid for place in places}, "none": set()}[options.stacks]
    show_stacks(sorted(shown))
    return 0


def not_arrived(members: Sequence[Place]) -> list[Place]:
    """The ranks that others wait for and that are not in the operation themselves."""
    waited_for = {rank for place in members for rank in place.ranks if place.waiting_in}
    furthest = max((place.sequence for place in members if place.operation), default=0)
    return [p for p in members if p.rank in waited_for and not p.waiting_in and p.sequence < max(furthest, 1)]


def describe(name: str, members: Sequence[Place]) -> Iterator[str]:
    """The lines of one group."""
    size = members[0].world_size
    yield f"Group {name!r}, {size} ranks:"
    for place in members:
        yield f"  rank {place.rank} (process {place.pid}): {_doing(place)}"
    absent = sorted(set(range(size)) - {place.rank for place in members})
    if absent:
        yield f"  not on this host, or ended: {_ranks(absent[:12], len(absent))}"
    late = not_arrived(members)
    waiting = [place for place in members if place.waiting_in]
    if late and waiting:
        longest = max(waiting, key=lambda place: place.waiting_s)
        yield (
            f"  Not arrived at {_operation(longest)}: {_ranks([place.rank for place in late], len(late))}; "
            f"{len(waiting)} wait, the longest for {longest.waiting_s:.1f} s."
        )


def _operation(place: Place) -> str | None:
    if place.operation:
        return f"{place.operation} #{place.sequence}"
    return place.waiting_in


def _doing(place: Place) -> str:
    if place.waiting_in:
        whom = _ranks(place.ranks, place.missing)
        return f"in {_operation(place)}, waits for {whom} for {place.waiting_s:.1f} s"
    if place.operation:
        return f"in {_operation(place)}"
    return f"in no operation; the last was #{place.completed}" if place.completed else "in no operation yet"


def _ranks(ranks: Sequence[int], count: int) -> str:
    more = ", ..." if count > len(ranks) else ""
    return f"rank{'s' * (count > 1)} {', '.join(map(str, ranks))}{more}"


def show_stacks(pids: Sequence[int]) -> None:
    if not pids:
        return
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=sys.exec_prefix + "/bin")
    if spy is None:
        print("Where they compute: install py-spy (pip install py-spy) to see their Python stacks.")
        return
    for pid in pids:
        try:
            dump = subprocess.run(
                [spy, "dump", "--nonblocking", "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=STACK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            print(f"Process {pid}: py-spy did not answer within {STACK_SECONDS} s")
            continue
        text = dump.stdout if dump.returncode == 0 else f"no stack: {dump.stderr.strip()}"
        print(f"Process {pid}:\n" + "\n".join("  " + line for line in text.strip().splitlines()))


if __name__ == "__main__":
    sys.exit(main())
