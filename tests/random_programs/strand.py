"""A strand: a thread of a rank that runs its part of a program. It keeps the order of the moments, and in
between waits for its works when its own draws say so (program.py).
"""

import contextlib
import heapq

import torch
import torch.distributed as dist
from collective_cases import DTYPES

import pycomm
from random_programs.calls import Call
from random_programs.memory import PLACEMENTS, Buffer, Pool
from random_programs.messages import Messages, Transfer
from random_programs.waiting import Left, Wait, WrongError

CPU = torch.device("cpu")
POST, WAIT = 0, 1  # of events at one moment


class Strand(Messages):
    def __init__(self, place, number):
        self.place, self.program, self.rank, self.number = place, place.program, place.rank, number
        self.pools, self.dropped, self.pending = {}, [], {}
        self.operations = self.errors = self.posted = 0
        self.events, self.doing = [], None
        self.never_made = set()  # groups, for a death
        self.closing = {op.group for op in self.program.operations if op.kind == "close"}

    # --- the order of events --------------------

    def run(self):
        for op in self.program.operations:
            if op.strand == self.number and self.rank in self.program.group(op).members:
                self.plan(op)
        with contextlib.suppress(Left):
            while self.events:
                *_, act, self.doing = heapq.heappop(self.events)
                self.come_to(self.doing)
                if self.doing.group not in self.never_made:
                    act(self.doing)
                elif self.doing.kind == "split":
                    self.never_made.update(group.number for group in self.made_by(self.doing))
            self.doing = "at its end"
            self.finish()

    def come_to(self, op):
        fault = self.program.fault
        self.place.note(op.number)
        if fault and fault.kind == "leave" and op.number >= fault.at and self.rank in self.program.gone:
            self.place.leave()
            raise Left

    def at(self, moment, op, act, kind=POST):
        self.posted += 1
        heapq.heappush(self.events, (moment, op.number, kind, self.posted, act, op))

    def plan(self, op):
        members, me = self.program.group(op).members, self.rank
        if op.kind == "message":
            for end, act in enumerate((self.send, self.receive)):
                if members[op.peers[end]] == me:
                    self.at(op.times[end], op, act)
        elif op.kind == "fan_in":
            if members[op.root] == me:
                self.at(op.times[1], op, self.fan_in_receive)
            elif self.own_rank(op) in op.peers:
                self.at(op.times[0], op, self.fan_in_send)
        else:
            special = {"exchange", "register", "split", "close", "mismatch"}
            self.at(op.times[0], op, getattr(self, op.kind) if op.kind in special else self.collective)

    def own_rank(self, op):
        return self.program.group(op).members.index(self.rank)

    def handle(self, op):
        return self.place.handles[op.group]

    def native(self, op):
        return self.program.group(op).front == "native"

    def local(self, op, what):
        return self.program.local(op, self.rank, what)

    def buffer(self, op):
        """Makes buffers of an operation, each placed by a draw of its own."""
        rng, pool = self.local(op, "place"), self.pools.get(op.group)

        def make(count, values=None, dense=False):
            placement = rng.choice([name for name in PLACEMENTS if not (dense and name == "strided")])
            registered = pool if rng.random() < 0.5 else None
            return Buffer(placement, DTYPES[op.dtype], count, values=values, pool=registered)

        return make

    # --- issuing and waiting --------------------

    def attempt(self, op, call, *args, members=None, **options):
        """(Result, error) of a call; an error is one that the program's fault explains. members: of a group
        that the call makes.
        """
        try:
            return call(*args, **options), None
        except pycomm.CommError as error:
            dead = self.program.gone
            if members is None or error.op is not None:  # not of the making
                members = self.program.group(op).members
            if self.place.left and isinstance(error, pycomm.AbortedError):
                raise Left from error
            peer = members[error.peer] if error.peer is not None and 0 <= error.peer < len(members) else None
            if isinstance(error, pycomm.PeerError) and peer in dead and error.peer is not None:
                self.errors += 1
                if not self.native(op):  # torch would take later calls for parts of a batch that has failed
                    dist.distributed_c10d._world.pg_coalesce_state.pop(self.handle(op), None)
                return None, error
            raise WrongError(f"{type(error).__name__}: {error}") from error

    def collective(self, op):
        rng = self.local(op, "issue")
        call = Call(self.program, op, self.own_rank(op), self.buffer(op))
        async_op = rng.random() < 0.5
        work, error = self.attempt(op, call.issue, self.handle(op), async_op)
        if error:
            return
        if not async_op:
            self.check(op, call)
        elif rng.random() < 0.1 and self.place.ends_together and op.group not in self.closing:
            self.dropped.append((op, call))  # nobody waits for it; the barrier at the end comes after it
        else:
            self.wait_later(op, [(call, work)])

    def wait_later(self, op, pairs):
        """At a moment of this rank's own, not before all ranks have posted what the works need."""
        rng = self.local(op, "wait")
        style = rng.choice(["wait", "wait", "poll", "thread", "future"])
        moment = max(op.times) + rng.choice([0.0, 0.0, rng.random() * 3, rng.random() * 15])
        rng.shuffle(pairs)
        waits = [(call, Wait(work, style, self.program.gone)) for call, work in pairs]
        self.pending[op.number] = (op, waits)
        self.at(moment, op, self.wait, WAIT)

    def wait(self, op):
        entry = self.pending.pop(op.number, None)
        for call, waiting in entry[1] if entry else ():
            _, error = self.attempt(op, waiting.finish)
            if error is None:
                if isinstance(call, Transfer):
                    call.source = waiting.source()
                self.check(op, call)
        if entry and op.kind == "fan_in":
            self.check_sources(op, [call for call, _ in entry[1]])

    def check(self, op, call):
        self.operations += 1
        found = list(call.differences())
        if found:
            raise WrongError("; ".join(found[:4]))
        call.end()

    # --- groups and memory --------------------

    def mismatch(self, op):
        rng = self.local(op, "issue")
        call = Call(self.program, op, self.own_rank(op), None)
        try:
            work, error = self.attempt(op, self.issue_and_wait, op, call, rng.random() < 0.5)
        except WrongError as wrong:
            if not isinstance(wrong.__cause__, pycomm.MismatchError):
                raise
            error = wrong.__cause__
        if error is None:
            raise WrongError("calls that do not match raised nothing")
        if not call.unchanged():
            raise WrongError("calls that do not match have written")
        self.operations += 1

    def issue_and_wait(self, op, call, async_op):
        work = call.issue(self.handle(op), async_op)
        if async_op:
            work.wait()

    def register(self, op):
        handle, nbytes = self.handle(op), op.counts[0]
        if self.native(op):
            tensor, error = self.attempt(op, handle.empty, nbytes, torch.uint8)
        else:
            allocate = handle._get_backend(CPU).allocate_tensor
            tensor, error = self.attempt(op, allocate, nbytes, dtype=torch.uint8, device=CPU)
        if error is None:
            if tensor.any():
                raise WrongError("registered memory is not zero")
            self.pools[op.group] = Pool(tensor)
            self.operations += 1

    def split(self, op):
        color, key = op.peers[self.own_rank(op)]
        group = next(iter(self.made_by(op)), None)
        made, error = self.attempt(
            op, self.handle(op).split, color, key, members=group.members if group else None
        )
        if error:
            self.never_made.add(group.number)
        if error or color is None:
            return
        if (made.rank, made.world_size) != (group.members.index(self.rank), len(group.members)):
            raise WrongError(f"split made rank {made.rank} of {made.world_size}, expected {group}")
        self.place.handles[group.number] = made
        self.operations += 1

    def made_by(self, op):
        """The group of this rank that a split makes, if there is one."""
        groups = self.program.groups
        return [group for group in groups if group.made_by == op.number and self.rank in group.members]

    def close(self, op):
        """Leaves the group as soon as all of its own operations are over."""
        for number in [number for number, (other, _) in self.pending.items() if other.group == op.group]:
            self.wait(self.pending[number][0])
        self.handle(op).close()
        self.pools.pop(op.group, None)

    def finish(self):
        """A barrier of each group that is left, which comes after what was dropped."""
        for group in self.program.groups:
            ours = group.strand == self.number and self.rank in group.members
            if ours and self.place.ends_together and group.number not in self.closing:
                handle = self.place.handles.get(group.number)
                if handle is not None:
                    self.last_barrier(group, handle)
        for op, call in self.dropped:
            self.check(op, call)

    def last_barrier(self, group, handle):
        call = handle.barrier if group.front == "native" else lambda: dist.barrier(handle)
        op = next((op for op in self.program.operations if op.group == group.number), None)
        if op is not None:
            _, error = self.attempt(op, call)
            if error:
                self.dropped = [(op, call) for op, call in self.dropped if op.group != group.number]
