"""A planted fault: a text of a source, and what an engineer could have written there by mistake.

Faults are data: faults/FOLDER.toml holds the faults of one folder that people wrote,
faults/machine_FOLDER.toml the ones that operators.py drew. The table's name says what is wrong.

[Note: fields] Of a table:
    file             from the root on
    kind             of mistake, one of KINDS
    old, new         `old` occurs once in the file
    alone            C++: it cannot share a program with others (see tests/planting.py)
    changes_nothing  why no user sees it, so that no test can
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest needs tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).resolve().parent / "faults"
KINDS = {
    "a size of the group", "another group", "off by one", "an order exchanged", "something left out",
    "freed or reused early", "a random state", "a limit ignored", "not compared", "a rank left out",
    "not saved", "not reset", "an exception swallowed", "a condition", "a wrong value", "a message",
}  # fmt: skip
MACHINE = "machine_"  # begins the names of files that operators.py wrote


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    kind: str
    old: str
    new: str
    alone: bool = False
    changes_nothing: str = ""
    by: str = "hand"
    times: int = 1

    @property
    def folder(self) -> str:
        """parallel/zero of parallel/zero/units.py; pycomm of pycomm/env.py."""
        parts = Path(self.file).parts[:-1]
        return "/".join(parts[:2])

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py")

    def lines(self, root: Path = ROOT) -> range:
        """The numbers of the lines that differ, from 1 on; where something is only added, those around it."""
        text = (root / self.file).read_text()
        begin = text.index(self.old)
        old, new = self.old.splitlines(), self.new.splitlines()
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        tail = 0
        while tail < min(len(old), len(new)) - same and old[-1 - tail] == new[-1 - tail]:
            tail += 1
        first = text.count("\n", 0, begin) + 1
        return range(first + same - (same == len(old) - tail), first + max(same + 1, len(old) - tail))

    def put_into(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new, 1))


def load(data: Path = DATA) -> dict[str, Fault]:
    """All faults by name. Raises ValueError for a name or a field that is wrong."""
    faults: dict[str, Fault] = {}
    known = {field.name for field in fields(Fault)} - {"name", "by"}
    for path in sorted(data.glob("*.toml")):
        by = "machine" if path.name.startswith(MACHINE) else "hand"
        for name, table in tomllib.loads(path.read_text()).items():
            if wrong := set(table) - known:
                raise ValueError(
                    f"{path.name}: {name}: unknown fields {sorted(wrong)}; fields: {sorted(known)}"
                )
            if name in faults:
                raise ValueError(f"{path.name}: there are two faults called {name!r}")
            faults[name] = Fault(name=name, by=by, **table)
    return faults


def without_place(faults: Iterable[Fault], root: Path = ROOT) -> dict[str, str]:
    """{name: what is wrong} of faults whose text does not occur exactly once, or whose kind is unknown."""
    wrong = {}
    for fault in faults:
        path = root / fault.file
        found = path.read_text().count(fault.old) if path.exists() else 0
        if found != 1:
            wrong[fault.name] = f"its old text occurs {found} times in {fault.file}, not once"
        elif fault.kind not in KINDS:
            wrong[fault.name] = f"kind {fault.kind!r} is not in {sorted(KINDS)}"
        elif fault.old == fault.new:
            wrong[fault.name] = "old and new are the same text"
    return wrong
