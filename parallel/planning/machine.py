"""A machine as the planner sees it, read from a TOML file: one kind of device, and links from inside to
outside.

    rank 0 .. 7 | 8 .. 15 | ...      a node of 8 ranks: level 0 (NVLink) inside, level 1 (InfiniBand) outside

Every number in machines/*.toml has its source beside it. Data sheets give peaks; what is reached of them
are the few constants of [reached], see [Note: constants] in time.py for where they were fitted.
"""

import math
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import NamedTuple

from pycomm.parallel.planning.quantities import ByteRate, FlopRate, MeanBytes, Seconds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Link", "Machine", "Reached", "known", "load_machine"]

FOLDER = Path(__file__).parent / "machines"


class Link(NamedTuple):
    """ranks: how many of them one such level joins, 0 for any number. bandwidth: what one rank sends,
    while it receives as many, as an all_reduce reaches it; latency: of one message. one_way: share of
    the bandwidth that all_gather, reduce_scatter and all_to_all reach: less than 1 where ranks share memory,
    and a rank's own part is copied as the others' are.
    """

    name: str
    ranks: int
    bandwidth: ByteRate
    latency: Seconds
    one_way: float = 1.0


class Reached(NamedTuple):
    """product: share of the peak that a large product reaches; product_half: size of the smallest dim at
    which it reaches half of that; memory: share of the bandwidth of memory; attention: share of the rate of
    its products that a fused attention reaches; launch: seconds of one kernel; overlap: share of a collective
    that hides behind computing, less where the cores that compute move the bytes.
    """

    product: float
    product_half: float
    memory: float
    attention: float
    launch: Seconds
    overlap: float

    def both(self, computing: Seconds, moving: Seconds) -> Seconds:
        """Of the two beside each other."""
        return Seconds(computing + moving - self.overlap * min(computing, moving))


class Machine(NamedTuple):
    """peak: of 16-bit products (of 32-bit ones on a CPU); memory: of a device, of which `reserved` bytes are
    not the model's; bandwidth: of memory; host: between device and host memory.
    """

    name: str
    peak: FlopRate
    memory: MeanBytes
    reserved: MeanBytes
    bandwidth: ByteRate
    host: ByteRate
    reached: Reached
    links: tuple[Link, ...]

    @property
    def node(self) -> float:
        """Ranks of a node."""
        return self.links[0].ranks or math.inf

    @property
    def usable(self) -> MeanBytes:
        return MeanBytes(self.memory - self.reserved)


def known() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_machine(name: str | Path) -> Machine:
    """The Machine in machines/<name>.toml, of which the first part is enough, or in the file of that path."""
    low = str(name).lower()
    near = [key for key in known() if key == low or key.startswith(f"{low}-")]
    path = Path(name) if str(name).endswith(".toml") or not near else FOLDER / f"{near[0]}.toml"
    if not path.is_file():
        raise ValueError(
            f"there is no machine {str(name)!r}: known are {', '.join(known())}, or the path of a .toml "
            "file, as "
            "`python -m pycomm.plan calibrate` writes it"
        )
    try:
        return from_toml(tomllib.loads(path.read_text()), path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no TOML: {error}") from None


def from_toml(table: Mapping[str, object], path: str | Path = "<toml>") -> Machine:
    """Raises ValueError that names the file and the key for what is missing, unknown or not above 0."""
    strange = sorted(set(table) - {"name", "device", "reached", "link"})
    if strange:
        raise ValueError(f"{path}: has {strange[0]!r}; known are name, [device], [reached] and [[link]]")
    device = _table(table, "device", path, "peak_tflops memory_gib reserved_gib memory_gb_s host_gb_s")
    reached = _table(table, "reached", path, "product product_half memory attention launch_us overlap")
    for key in ("product", "memory", "attention", "overlap"):
        if reached[key] > 1:
            raise ValueError(f"{path}: [reached] {key} = {reached[key]!r}: a share is 1 at most")
    if device["reserved_gib"] >= device["memory_gib"]:
        raise ValueError(f"{path}: [device] reserved_gib leaves nothing of memory_gib")
    return Machine(
        str(table.get("name", path)),
        FlopRate(device["peak_tflops"] * 1e12),
        MeanBytes(device["memory_gib"] * 2**30),
        MeanBytes(device["reserved_gib"] * 2**30),
        ByteRate(device["memory_gb_s"] * 1e9),
        ByteRate(device["host_gb_s"] * 1e9),
        Reached(
            reached["product"],
            reached["product_half"],
            reached["memory"],
            reached["attention"],
            Seconds(reached["launch_us"] * 1e-6),
            reached["overlap"],
        ),
        _links(table.get("link", []), path),
    )


def _links(entries: object, path: str | Path) -> tuple[Link, ...]:
    """Inside of a node, and between nodes; one level where all ranks share one node."""
    found = []
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        level = entry if isinstance(entry, dict) else {}  # which is refused below
        keys = "name ranks gb_s latency_us" + " one_way" * ("one_way" in level)
        given = _numbers(entry, f"link {number}", path, keys, zero=("ranks",))
        if given.get("one_way", 1) > 1:
            raise ValueError(f"{path}: link {number} one_way = {given['one_way']!r}: a share is 1 at most")
        if given["ranks"] != int(given["ranks"]):
            raise ValueError(f"{path}: link {number} ranks = {given['ranks']!r}: must be a whole number")
        ranks = int(given["ranks"])
        bandwidth, latency = ByteRate(given["gb_s"] * 1e9), Seconds(given["latency_us"] * 1e-6)
        found.append(Link(str(level["name"]), ranks, bandwidth, latency, given.get("one_way", 1.0)))
    if not 1 <= len(found) <= 2 or found[-1].ranks or (len(found) == 2 and not found[0].ranks):
        raise ValueError(
            f"{path}: needs one [[link]], or two: that of a node with its number of ranks, and that between "
            "nodes; the last with ranks = 0 (any number)"
        )
    return tuple(found)


def _table(table: Mapping[str, object], name: str, path: str | Path, keys: str) -> dict[str, float]:
    if name not in table:
        raise ValueError(f"{path}: has no [{name}]")
    return _numbers(table[name], f"[{name}]", path, keys, zero=("reserved_gib", "overlap"))


def _numbers(
    given: object, where: str, path: str | Path, names: str, zero: Container[str] = ()
) -> dict[str, float]:
    """Those of `given`, checked: exactly these keys, numbers above 0 (or 0 in `zero`), but for names."""
    keys = names.split()
    if not isinstance(given, dict):
        raise ValueError(f"{path}: {where} is {given!r}; it must be a table with {', '.join(keys)}")
    wrong = sorted(set(given) ^ set(keys))
    if wrong:
        raise ValueError(
            f"{path}: {where} must have {', '.join(keys)}; missing or unknown: {', '.join(wrong)}"
        )
    found = {key: given[key] for key in keys if key != "name"}
    for key, value in found.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or value < 0
            or not (value or key in zero)
        ):
            raise ValueError(f"{path}: {where} {key} = {value!r}: must be a number above 0")
    return found
