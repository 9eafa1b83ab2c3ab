"""Rules for the order of data and signals (pycomm/fused/kernels/signal.py), looked for in the PTX of a
compiled kernel.

The interpreter cannot show that an order is missing, and a GPU shows it once in a million launches. The text
of the compiled kernel shows it every time. What goes to a peer or comes from it is known by its address: it
was loaded from the parameter `table` (ptx.py, origins).

    post    every release at a peer has .sys and on every path a bar.sync just before it: no store since.
            Every store of data to a peer has such a release on every path behind it
    wait    every acquire at a peer has .sys; it, or one of the same wait, is in a loop that ends by what it
            loads; a bar.sync comes before data is loaded; no data of peers alone is loaded where no acquire
            came before
    width   data to and from peers moves 16 bytes at a time, but for single words
    ways    peers' memory is touched by no relaxed or volatile access, and by no asynchronous copy of the
            tensor memory accelerator
    known   every store and atomic has an address of known origin
    counts  posts, waits and single words in the source, however often the compiler has copied them (EXPECTED)

What it cannot see: that an index is wrong, or that a program waits for the wrong word. The interpreter sees
that.
"""

import re
from typing import NamedTuple

from ptx import PEER, UNKNOWN, Kernel

WIDE = 16  # bytes


class Counts(NamedTuple):
    """Of places in the source."""

    posts: int
    waits: int
    words: int  # single words stored to a peer by one thread, or read by all


def expected(op, *, one_shot=False, keep=False):
    """Counts of a kernel of pycomm.fused."""
    return {
        "matmul": Counts(0, 0, 0),
        # begin, push | the waits of the multipliers, of the keepers, of meet | the fingerprint in begin and
        # in meet
        "all_gather_matmul": Counts(2, 3 if keep else 2, 2),
        # begin, send_tile | sum_when_here, meet
        "matmul_reduce_scatter": Counts(2, 2, 2),
        # two-shot besides: hand_round posts, finish_from_results waits
        "matmul_all_reduce": Counts(2, 2, 2) if one_shot else Counts(3, 3, 2),
    }[op]


class Violation(NamedTuple):
    line: int  # of the PTX; 0: the kernel as a whole
    rule: str
    text: str

    def __str__(self):
        return f"line {self.line}: {self.rule}: {self.text}"


def check(text, pointers, counts=None):
    """Violations in the PTX of a kernel, a list of Violation. pointers: names of its pointer parameters, in
    order; counts: Counts.
    """
    checker = Checker(Kernel(text, pointers))
    for rule in (
        checker.check_known,
        checker.check_posts,
        checker.check_waits,
        checker.check_width,
        checker.check_ways,
    ):
        rule()
    if counts is not None:
        checker.check_counts(counts)
    return sorted(checker.violations)


class Checker:
    def __init__(self, kernel):
        self.kernel = kernel
        self.violations = []
        self.origins = {
            index: frozenset(kernel.origins_of_address(x))
            for index, x in enumerate(kernel.instructions)
            if x.address and is_global(x)
        }
        self.at_peer = {
            index: kernel.instructions[index] for index, origins in self.origins.items() if PEER in origins
        }
        self.posts = {index: x for index, x in self.at_peer.items() if is_release(x)}
        self.polls = {index: x for index, x in self.at_peer.items() if is_acquire(x)}
        self.words = {
            index: x
            for index, x in self.at_peer.items()
            if x.nbytes == 4
            and (
                is_plain(x, "st")
                and kernel.only_one_thread(x)
                or is_plain(x, "ld")
                and kernel.same_in_all_threads(x)
            )
        }

    def report(self, instruction, rule, text):
        self.violations.append(
            Violation(
                instruction.line, rule, f"{text} ({instruction.opcode} at {instruction.site.split(' ')[0]})"
            )
        )

    def check_known(self):
        for index, origins in self.origins.items():
            x = self.kernel.instructions[index]
            if writes(x) and (not origins or UNKNOWN in origins):
                self.report(x, "known", f"address of unknown origin: {x.address}")
            if writes(x) and PEER in origins and len(origins) > 1:
                self.report(x, "known", f"address may be a peer's or another: {sorted(origins)}")

    def check_posts(self):
        stores = {
            id(self.kernel.instructions[index])
            for index in self.origins
            if writes(self.kernel.instructions[index])
        }
        fresh = self.kernel.holds(self.is_barrier, lambda x: id(x) in stores)
        posts = {id(x) for x in self.posts.values()}
        released = self.kernel.will_hold(lambda x: id(x) in posts)
        for index, origins in self.origins.items():
            x = self.kernel.instructions[index]
            if not is_release(x):
                continue
            if not x.has("sys") and origins != {"local"}:
                self.report(
                    x,
                    "post",
                    f"release to {' or '.join(sorted(origins)) or 'an unknown address'} without .sys",
                )
            if not fresh[index] and "record" not in origins:
                self.report(x, "post", "no bar.sync between the last store and this release, on some path")
        for index, x in self.at_peer.items():
            if is_plain(x, "st") and not released[index]:
                self.report(x, "post", "data for a peer with no release behind it, on some path")

    def check_waits(self):
        kernel = self.kernel
        spinning = {index for index in self.polls if self.spins(index)}
        found = {
            (place_of(kernel.instructions[index]), kernel.instructions[index].address) for index in spinning
        }
        for x in self.polls.values():
            if not x.has("sys"):
                self.report(x, "wait", "acquire at a peer's word without .sys")
            if (place_of(x), x.address) not in found:
                self.report(x, "wait", "acquire that no loop repeats until the word has come")
        polls = {id(x) for x in self.polls.values()}
        ordered = kernel.holds(
            lambda x: self.is_barrier(x) or id(x) == id(kernel.instructions[0]), lambda x: id(x) in polls
        )
        seen = kernel.holds(lambda x: id(x) in polls, lambda x: False)
        for index, x in self.at_peer.items():
            if not is_plain(x, "ld") and not x.has("cp", "async"):
                continue
            if not ordered[index]:
                self.report(
                    x, "wait", "data of a peer is loaded with no bar.sync behind the acquire, on some path"
                )
            if self.origins[index] == {PEER} and not seen[index]:
                self.report(x, "wait", "data of a peer is loaded with no acquire before, on some path")

    def spins(self, index):
        """Whether the innermost loop around a load ends by what it loads."""
        loop = self.kernel.loop_around(index)
        values = self.kernel.values_from(index)
        for position in loop:
            branch = self.kernel.instructions[position]
            leaves = any(follower not in loop for follower in self.kernel.successors[position])
            if (
                branch.opcode.startswith("bra")
                and branch.guard
                and leaves
                and branch.guard.lstrip("!") in values
            ):
                return True
        return False

    def check_width(self):
        for index, x in self.at_peer.items():
            if index in self.words or not (is_plain(x, "st") or is_plain(x, "ld")):
                continue
            # With another origin: rows of this rank's a or of a peer's, of any length.
            if self.origins[index] == {PEER} and x.nbytes < WIDE:
                self.report(x, "width", f"{x.nbytes} bytes at a time between ranks")

    def check_ways(self):
        for x in self.at_peer.values():
            if x.has("relaxed") or x.has("volatile") or x.has("mmio"):
                self.report(x, "ways", "a peer's memory by an access without order")
            elif x.opcode.split(".")[0] in ("atom", "red") and not is_release(x) and not is_acquire(x):
                self.report(x, "ways", "a peer's memory by an atomic without order")
            if x.has("bulk"):
                self.report(x, "ways", "a peer's memory by an asynchronous copy, which no signal orders")

    def check_counts(self, counts):
        found = Counts(
            *(len({place_of(x) for x in group.values()}) for group in (self.posts, self.polls, self.words))
        )
        for name in Counts._fields:
            if getattr(found, name) != getattr(counts, name):
                self.violations.append(
                    Violation(
                        0, "counts", f"{getattr(found, name)} {name}, the source has {getattr(counts, name)}"
                    )
                )

    def is_barrier(self, x):
        """Of the whole program: bar.sync 0, by all of its threads."""
        if not (x.has("bar", "sync") or x.has("barrier", "sync")):
            return False
        return x.operands[0] == "0" and (len(x.operands) == 1 or x.operands[1] == str(self.kernel.threads))


def is_global(x):
    kind = x.opcode.split(".")[0]
    return kind in ("ld", "st", "atom", "red", "cp", "multimem") and not (
        x.has("param") or (kind != "cp" and re.search(r"\.(shared|local|const)\b", x.opcode))
    )


def is_release(x):
    return x.opcode.split(".")[0] in ("atom", "red", "st") and (x.has("release") or x.has("acq_rel"))


def is_acquire(x):
    return x.opcode.split(".")[0] in ("atom", "ld") and (x.has("acquire") or x.has("acq_rel"))


def is_plain(x, kind):
    """A load or store of data: without an order of its own."""
    return x.opcode.split(".")[0] == kind and not (x.has("release") or x.has("acquire") or x.has("relaxed"))


def writes(x):
    kind = x.opcode.split(".")[0]
    return (
        kind in ("st", "red", "multimem")
        or (kind == "atom" and not is_acquire(x))
        or (kind == "cp" and x.has("bulk") and ".global.shared" in x.opcode)
    )


def place_of(x):
    """The call of the function, post or wait_for, that the instruction is part of; by itself where it is in
    none.
    """
    return x.calls or x.site


def shortcomings(record):
    """What is wrong with a kernel by its record (aot.py), a list of words."""
    if "failed" in record:
        return [f"does not compile: {record['failed']}"]
    found = []
    if record["spilled"]:
        found.append(f"spilled: {record['spilled']} bytes, {record['registers']} registers")
    if record["shared"] > record["shared_limit"]:
        found.append(f"shared memory: {record['shared']} bytes of {record['shared_limit']}")
    if record["dtype"] != "float32" and not record["tensor_cores"]:
        found.append("tensor cores: not used")
    return found + record["violations"]
