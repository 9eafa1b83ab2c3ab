"""A random program: what every rank does, drawn from a seed alone.

    group 0  ranks 0 1 2 3     strand 0  --#1 all_reduce----#4 recv posted------#6 broadcast---#7 wait #4--
    group 1  ranks 2 0         strand 0  -------#2 send---------------#5 split---------------------
    group 2  ranks 0 1 2 3     strand 1  ----#3 all_to_all----- ...

A strand is a thread of every rank with groups of its own. Inside a strand all ranks follow one order in time.
A collective has one moment, equal on all ranks; a message has one where it is sent and one where it is
received, which may lie many operations apart. Everything else is drawn by each rank for itself (local()):
whether a call is asynchronous, when its work is waited for and how, where the buffers lie.

[Note: no deadlock by construction] A call that blocks at a moment needs only what is posted by the ranks at
that moment or before: a collective its own moment; a synchronous send or recv is drawn only where the other
end is posted before it; a wait comes after both ends. So by induction over the order, a rank that blocks
for good is a defect of the runtime: messages must progress whatever their ranks do elsewhere.

Messages of one (group, src, dst, tag) are received in the order of sending. One that is received from any
source has a tag of its own, and only its fan_in shares it, so what must come out is known.

[Note: shrinking] An operation's values and each rank's draws for it depend on the seed and its number only.
So operations can be left out, and the rest stays what it was.
"""

import dataclasses
import random

from collective_cases import ALGORITHMS, DTYPES

MOVED = list(DTYPES)
FLOATS, INTEGERS = ["f64", "f32", "f16", "bf16"], ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"]
REDUCED = {name: ["sum", "avg", "product", "min", "max", "premul_sum"] for name in FLOATS}
REDUCED |= {name: ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"] for name in INTEGERS}
REDUCED |= {"bool": ["sum", "product", "min", "max", "band", "bor", "bxor"]}
REDUCED |= {name: ["sum", "avg", "product", "premul_sum"] for name in ("c64", "c128")}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
UGLY = [0, 1, 2, 7, 9, 11, 15, 17, 63, 65, 119, 121, 239, 241, 500, 959, 961, 1023, 2047, 2049, 4097, 8193]
LARGE = [65535, 65537, 131073, 524287, 524289, 1048577]  # bytes; around the limits of routes
HUGE = [4194303, 4194305]
TAGS = (0, 0, 0, 1, 2, -7, 2**31 - 1)
OWN_TAGS = 1000  # from here on a tag is one operation's


@dataclasses.dataclass(frozen=True)
class Group:
    number: int
    members: tuple  # ranks of the program, in the order of the group
    front: str  # "native" or "torch"
    strand: int
    made_by: int | None = None  # the split that makes it; None: made at the beginning


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation. Ranks are those of its group.

    Attributes:
        number: its place in the order; unique.
        times: a collective's moment, or those of (sending, receiving).
        counts: elements: (count,); of the parts of all_gather and reduce_scatter; of an all_to_all rows of
            parts, from rank to rank.
        peers: of a message (src, dst); of a fan_in the senders; of an exchange (src, dst, count) each; of a
            split (color, key) of each rank.
        odd: the rank that brings something else to a mismatch.
    """

    number: int
    strand: int
    group: int
    kind: str
    times: tuple
    counts: tuple = ()
    dtype: str = "f32"
    reduce_op: str = "sum"
    algorithm: str | None = None
    root: int = 0
    form: str = ""
    peers: tuple = ()
    tag: int = 0
    odd: int = 0

    def __str__(self):
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[3:]}
        told = {name: value for name, value in fields.items() if value not in ((), None, 0, "", self.kind)}
        return f"#{self.number} {self.kind} " + " ".join(f"{name}={value}" for name, value in told.items())


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a process: "kill" or "stop" (and, `seconds` later, continue), `delay` seconds after its
    first rank has come to operation `at`; "leave": that rank closes all its groups when it comes to it."""

    kind: str
    process: int
    at: int
    delay: float
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    fault_kind: str  # of the draw: "none", "kill", "stop" or "leave"
    processes: tuple  # the ranks of each, as threads of it
    options: dict  # of the groups
    cma: bool
    groups: tuple
    operations: tuple
    fault: Fault | None
    torch: bool  # there is a default group of torch.distributed
    hosts: int = 1  # that are simulated, at most; processes are dealt out to them

    def host_of(self, process):
        return process % self.hosts

    def hosts_of(self, operation):
        """That of each member of its group."""
        of_rank = {rank: self.host_of(p) for p, ranks in enumerate(self.processes) for rank in ranks}
        return [of_rank[rank] for rank in self.group(operation).members]

    @property
    def gone(self):
        """The ranks that do not come to the end."""
        if self.fault is None or self.fault.kind == "stop":
            return frozenset()
        ranks = self.processes[self.fault.process]
        return frozenset(ranks if self.fault.kind == "kill" else ranks[:1])

    @property
    def world_size(self):
        return sum(map(len, self.processes))

    def group(self, operation):
        return self.groups[operation.group]

    def local(self, operation, rank, what):
        """The draws of one rank for one operation, others for each purpose."""
        return random.Random(f"{self.seed} {operation.number} {rank} {what}")


def draw(seed, fault_kind="none", hosts=1):
    """The program of a seed."""
    return dataclasses.replace(_Draw(seed, fault_kind).program(), hosts=hosts)


class _Draw:
    def __init__(self, seed, fault_kind):
        self.seed, self.fault_kind = seed, fault_kind
        self.rng = random.Random(f"{seed} {fault_kind}")
        self.groups, self.operations, self.closed = [], [], set()
        self.any_source = fault_kind != "leave"  # a recv goes on to wait for the ranks that are left
        self.last = {}  # (group, src, dst, tag) -> moments of the last message

    def program(self):
        rng = self.rng
        n = rng.choice([1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8])
        n = max(2, n) if self.fault_kind != "none" else n
        processes = self.draw_processes(n)
        torch = rng.random() < 0.5 and len(processes) == n and self.fault_kind != "leave"
        self.draw_groups(n, torch)
        length = rng.choice([8, 20, 40, 80])
        for number in range(length):
            self.draw_operation(number)
        options = {
            "staging_bytes": rng.choice([None, None, 1 << 17, 1 << 18, 1 << 20]),
            "threads": rng.choice([None, 1, 1, 2, 3]),
        }
        return Program(
            self.seed, self.fault_kind, processes, options, rng.random() < 0.7, tuple(self.groups),
            tuple(self.operations), self.draw_fault(processes, length), torch,
        )  # fmt: skip

    def draw_processes(self, n):
        """Ranks as threads, as processes, or several in each of some processes."""
        ranks, how = list(range(n)), self.rng.random()
        if how < 0.3 and self.fault_kind in ("none", "leave"):
            return (tuple(ranks),)
        if how < 0.85 or n < 3:
            return tuple((rank,) for rank in ranks)
        self.rng.shuffle(ranks)
        cut = self.rng.randrange(1, n)
        return (tuple(sorted(ranks[:cut])), tuple(sorted(ranks[cut:])))

    def draw_groups(self, n, torch):
        rng = self.rng
        for strand in range(rng.choice([1, 1, 2, 3])):
            for _ in range(rng.choice([1, 1, 2, 3])):
                members = list(range(n))
                if rng.random() < 0.4:
                    members = rng.sample(members, rng.randrange(1, n + 1))
                front = "torch" if torch and rng.random() < 0.6 else "native"
                # torch sorts the ranks of a group
                members = sorted(members) if front == "torch" or rng.random() < 0.5 else members
                self.groups.append(Group(len(self.groups), tuple(members), front, strand))

    def draw_fault(self, processes, length):
        rng, kind = self.rng, self.fault_kind
        if kind == "none":
            return None
        process, delay = rng.randrange(len(processes)), rng.choice([0, 0, rng.random() * 2e-3])
        return Fault(kind, process, rng.randrange(length), delay, rng.choice([0.02, 0.1, 0.3]))

    # --- operations --------------------

    def draw_operation(self, number):
        rng = self.rng
        group = rng.choice([group for group in self.groups if group.number not in self.closed])
        n = len(group.members)
        kinds = list(ALGORITHMS) * 2 + ["all_reduce", "barrier"]
        if n > 1:
            kinds += ["message"] * 12 + ["exchange"] * 3 + ["fan_in"] * 2 * self.any_source + ["mismatch"]
        lasting = self.fault_kind not in ("kill", "leave")
        kinds += ["register"] * (self.fault_kind != "leave")
        if group.front == "torch":
            kinds += ["coalesced"] * 2
        elif self.fault_kind != "leave":
            kinds += ["split"]
            kinds += ["close"] * (lasting and len(self.groups) - len(self.closed) > 1)
        common = {"number": number, "strand": group.strand, "group": group.number}
        kind = rng.choice(kinds)
        make = getattr(self, f"_{kind}", self._collective)
        self.operations.append(make(group, kind, {"kind": kind, "times": (float(number),), **common}))

    def count(self, most=60000):
        rng = self.rng
        draws = [lambda: rng.choice(UGLY), lambda: rng.randrange(300), lambda: rng.randrange(9000)]
        draws += [draws[0], lambda: rng.randrange(60000), lambda: rng.randrange(most)]
        return min(most, rng.choice(draws)())

    def message_count(self, dtype):
        size, rng = DTYPES[dtype].itemsize, self.rng
        if dtype == "bool" or rng.random() < 0.8:
            return self.count()
        return rng.choice(LARGE * 3 + HUGE) // size

    def dtype(self, group, names=MOVED):
        # torch views complex tensors as real ones, for which they must be contiguous
        names = [name for name in names if group.front == "native" or not name.startswith("c")]
        return self.rng.choice([*names, *["f32"] * (len(names) // 2)])

    def reduction(self, group):
        dtype = self.dtype(group, list(REDUCED))
        return {"dtype": dtype, "reduce_op": self.rng.choice(REDUCED[dtype])}

    def _collective(self, group, kind, common):
        rng, n = self.rng, len(group.members)
        if kind == "barrier":
            return Operation(**common)
        fields = self.reduction(group) if kind in REDUCING else {"dtype": self.dtype(group)}
        native = group.front == "native"
        fields["algorithm"] = rng.choice(ALGORITHMS[kind]) if native and rng.random() < 0.5 else None
        fields["root"] = rng.randrange(n)
        count = self.count(400000 // n)
        forms = ["flat", "splits", "list", "mixed"] if kind == "all_to_all" else ["flat", "list"]
        fields["form"] = rng.choice(forms)
        even = fields["form"] == "flat" or rng.random() < 0.3
        if kind in ("all_gather", "reduce_scatter"):
            fields["counts"] = tuple(count if even else self.count(400000 // n) for _ in range(n))
        elif kind == "all_to_all":
            size = self.count(200000 // n // n)
            plain = {r for r in range(n) if even or (fields["form"] == "mixed" and rng.random() < 0.5)}
            fields["counts"] = tuple(
                tuple(size if {p, q} & plain else self.count(200000 // n // n) for q in range(n))
                for p in range(n)
            )
        else:
            fields["counts"] = (count,)
        return Operation(**common, **fields)

    def _mismatch(self, group, kind, common):
        fields = {"counts": (self.count(9000),), "odd": self.rng.randrange(len(group.members))}
        return Operation(**common, **fields, form=self.rng.choice(["count", "dtype"]))

    def _coalesced(self, group, kind, common):
        counts = tuple(self.count(20000) for _ in range(self.rng.randrange(1, 6)))
        form = self.rng.choice(["all_reduce", "all_gather", "reduce_scatter"])
        return Operation(**common, **self.reduction(group), counts=counts, form=form)

    def _message(self, group, kind, common):
        rng, number = self.rng, common["number"]
        src, dst = rng.sample(range(len(group.members)), 2)
        early, late = number + rng.choice([0.1, 0.3, 0.5]), number + rng.choice([0.2, 0.4, rng.random() * 25])
        times = [early, late] if rng.random() < 0.5 else [late, early]
        form = "any" if self.any_source and rng.random() < 0.15 else ""
        tag = OWN_TAGS + number if form else rng.choice(TAGS)
        last = self.last.get((group.number, src, dst, tag), (-1.0, -1.0))
        times = [max(time, before + 0.01) for time, before in zip(times, last, strict=True)]
        self.last[group.number, src, dst, tag] = times
        dtype = self.dtype(group)
        fields = {"dtype": dtype, "counts": (self.message_count(dtype),), "tag": tag, "form": form}
        return Operation(**(common | {"times": tuple(times)}), **fields, peers=(src, dst))

    def _exchange(self, group, kind, common):
        """Every rank sends to some others, all at once."""
        rng, n, dtype = self.rng, len(group.members), self.dtype(group)
        pairs = [(src, dst) for src in range(n) for dst in range(n) if src != dst]
        pairs = rng.sample(pairs, min(len(pairs), rng.randrange(1, 2 * n)))
        fields = {"dtype": dtype, "tag": OWN_TAGS + common["number"]}
        return Operation(
            **common, **fields, peers=tuple((*pair, self.message_count(dtype)) for pair in pairs)
        )

    def _fan_in(self, group, kind, common):
        """Several messages of several ranks to one, which receives them from any source."""
        rng, n, number = self.rng, len(group.members), common["number"]
        root, dtype = rng.randrange(n), self.dtype(group)
        others = [rank for rank in range(n) if rank != root]
        peers = tuple(rng.sample(others, rng.randrange(1, n)))
        fields = {"root": root, "dtype": dtype, "tag": OWN_TAGS + number}
        fields["counts"] = (max(1, self.count()), rng.choice([1, 2, 5, 12]))
        times = (number + rng.random() * 8, number + rng.random() * 8)
        return Operation(**(common | {"times": times}), **fields, peers=peers)

    def _register(self, group, kind, common):
        return Operation(**common, counts=(self.rng.choice([1, 4096, 100003, 1 << 20, 3 << 20]),))

    def _split(self, group, kind, common):
        """Beside a death all ranks make one group: of two, one would wait for a rank that lives and, as the
        old group is broken, does not come.
        """
        rng, number = self.rng, common["number"]
        colors = [0] if self.fault_kind == "kill" else [0, 0, 1, None]
        choices = [(color, rng.choice([0, -1, 1])) for color in rng.choices(colors, k=len(group.members))]
        for color in sorted({color for color, _ in choices} - {None}):
            order = sorted((key, rank) for rank, (own, key) in enumerate(choices) if own == color)
            members = tuple(group.members[rank] for _, rank in order)
            self.groups.append(Group(len(self.groups), members, "native", group.strand, number))
        return Operation(**common, peers=tuple(choices))

    def _close(self, group, kind, common):
        """Later than every message of the group."""
        self.closed.add(group.number)
        latest = [time for op in self.operations if op.group == group.number for time in op.times]
        return Operation(**(common | {"times": (max([*latest, common["number"]]) + 1.0,)}))
