"""One collective of a program on one rank: its buffers, the call, and what must be in them after it."""

import functools

import torch
import torch.distributed as dist
from collective_cases import DTYPES, difference, same
from torch.distributed.distributed_c10d import _coalescing_manager

import pycomm
from pycomm.groups import all_gather_flat, reduce_scatter_flat
from random_programs import values

TORCH_OPS = {
    name: getattr(dist.ReduceOp, name.upper()) for name in "sum avg product min max band bor bxor".split()
}


class Call:
    """`issue(handle, async_op)` calls it on a Communicator or a torch group and returns the work or None."""

    def __init__(self, program, op, rank, buffer):
        """rank: in the group. buffer(count, values=None): a Buffer of the operation's dtype; an option
        dense=True where the interface takes no other.
        """
        self.program, self.op, self.rank, self.buffer = program, op, rank, buffer
        self.ranks = len(program.group(op).members)
        self.native = program.group(op).front == "native"
        self.in_place = program.local(op, rank, "in place").random() < 0.4
        self.kept, self.made, self.issue = [], [], None
        getattr(self, op.kind)()

    # --- buffers --------------------

    def put(self, values, **options):
        """An input, which must be kept."""
        buffer = self.buffer(values.numel(), values=values, **options)
        self.kept.append((buffer, values))
        return buffer.tensor

    def get(self, expected, **options):
        """An output."""
        buffer = self.buffer(expected.numel(), **options)
        self.made.append((buffer, expected))
        return buffer.tensor

    def change(self, values, expected):
        """An input that becomes an output; expected=None: it is kept."""
        buffer = self.buffer(values.numel(), values=values)
        self.made.append((buffer, values if expected is None else expected))
        return buffer.tensor

    def differences(self):
        """What is not as it must be, as text; the operation is over."""
        for what, pairs in (("input", self.kept), ("output", self.made)):
            for i, (buffer, expected) in enumerate(pairs):
                if expected is None:
                    if not buffer.untouched():
                        yield f"{what} {i} was written"
                elif not same(buffer.tensor, expected):
                    yield difference(f"{what} {i}", buffer.tensor, expected)
                if not buffer.guards_kept():
                    yield f"{what} {i}: memory around it was written"

    def end(self):
        for buffer, _ in self.kept + self.made:
            buffer.end()

    # --- helpers --------------------

    def how(self, async_op):
        return {"async_op": async_op, "algorithm": self.op.algorithm}

    @property
    def reduction(self):
        if not self.native:
            if self.op.reduce_op == "premul_sum":
                return dist._make_nccl_premul_sum(values.FACTOR)
            return TORCH_OPS[self.op.reduce_op]
        return pycomm.premul_sum(values.FACTOR) if self.op.reduce_op == "premul_sum" else self.op.reduce_op

    def moved(self, part, count):
        return values.moved(self.program, self.op, part, count)

    def is_root(self):
        return self.rank == self.op.root

    # --- one method per kind: makes the buffers and self.issue --------------------

    def barrier(self):
        if self.native:
            self.issue = lambda comm, async_op: comm.barrier(async_op=async_op)
        else:
            self.issue = lambda group, async_op: dist.barrier(group, async_op=async_op)

    def all_reduce(self):
        inputs = values.to_reduce(self.program, self.op, self.op.counts[0], self.ranks)
        expected, own, op = values.reduced(self.program, self.op, inputs), inputs[self.rank], self.reduction
        if not self.native:
            x = self.change(own, expected)
            self.issue = lambda group, async_op: dist.all_reduce(x, op=op, group=group, async_op=async_op)
            return
        x = self.change(own, expected) if self.in_place else self.put(own)
        out = None if self.in_place else self.get(expected)
        self.issue = lambda comm, async_op: comm.all_reduce(x, op, out=out, **self.how(async_op))

    def reduce(self):
        inputs = values.to_reduce(self.program, self.op, self.op.counts[0], self.ranks)
        own, op, root = inputs[self.rank], self.reduction, self.op.root
        expected = values.reduced(self.program, self.op, inputs) if self.is_root() else None
        if not self.native:
            x = self.change(own, expected)
            self.issue = lambda group, async_op: dist.reduce(
                x, op=op, group=group, group_dst=root, async_op=async_op
            )
            return
        in_place = self.in_place or not self.is_root()
        x = self.change(own, expected) if in_place else self.put(own)
        out = None if in_place else self.get(expected)
        self.issue = lambda comm, async_op: comm.reduce(x, root, op, out=out, **self.how(async_op))

    def broadcast(self):
        root, count = self.op.root, self.op.counts[0]
        x = self.change(self.moved(self.rank, count), self.moved(root, count))
        if self.native:
            self.issue = lambda comm, async_op: comm.broadcast(x, root, **self.how(async_op))
        else:
            self.issue = lambda group, async_op: dist.broadcast(
                x, group=group, group_src=root, async_op=async_op
            )

    def all_gather(self):
        parts = [self.moved(rank, count) for rank, count in enumerate(self.op.counts)]
        x = self.put(parts[self.rank], dense=not self.native)
        if self.op.form == "flat":
            out = self.get(_join(parts), dense=True)
        else:
            out = [self.get(part, dense=not self.native) for part in parts]
        if self.native:
            self.issue = lambda comm, async_op: comm.all_gather(x, out, **self.how(async_op))
        else:
            call = all_gather_flat if self.op.form == "flat" else dist.all_gather
            self.issue = lambda group, async_op: call(out, x, group=group, async_op=async_op)

    def reduce_scatter(self):
        counts, op = self.op.counts, self.reduction
        parts = [
            values.to_reduce(self.program, self.op, count, self.ranks, p) for p, count in enumerate(counts)
        ]
        out = self.get(values.reduced(self.program, self.op, parts[self.rank]), dense=not self.native)
        own = [part[self.rank] for part in parts]
        if self.op.form == "flat":
            x = self.put(torch.cat(own), dense=True)
            x = x.view(self.ranks, -1) if counts[0] else x.view(self.ranks, 0)
        else:
            x = [self.put(part, dense=not self.native) for part in own]
        if self.native:
            self.issue = lambda comm, async_op: comm.reduce_scatter(x, out, op, **self.how(async_op))
        else:
            call = reduce_scatter_flat if self.op.form == "flat" else dist.reduce_scatter
            self.issue = lambda group, async_op: call(out, x, op=op, group=group, async_op=async_op)

    def all_to_all(self):
        counts, rank, form = self.op.counts, self.rank, self.op.form
        if form == "mixed":  # each rank in its own way
            uneven = len({*counts[rank], *(row[rank] for row in counts)}) > 1
            form = self.program.local(self.op, rank, "form").choice(["splits", "list", "flat"][: 3 - uneven])
        ins = [self.moved(rank * self.ranks + p, count) for p, count in enumerate(counts[rank])]
        outs = [self.moved(p * self.ranks + rank, counts[p][rank]) for p in range(self.ranks)]
        if form == "list":
            x = [self.put(part, dense=not self.native) for part in ins]
            out = [self.get(part, dense=not self.native) for part in outs]
        else:
            x, out = self.put(_join(ins), dense=True), self.get(_join(outs), dense=True)
        splits = [None, None]
        if form == "splits":
            splits = [list(counts[rank]), [row[rank] for row in counts]]
        if not self.native:
            if form == "list":
                self.issue = lambda group, async_op: dist.all_to_all(out, x, group=group, async_op=async_op)
            else:
                self.issue = lambda group, async_op: dist.all_to_all_single(
                    out, x, splits[1], splits[0], group=group, async_op=async_op
                )
            return
        options = {} if form == "list" else {"in_splits": splits[0], "out_splits": splits[1]}
        self.issue = lambda comm, async_op: comm.all_to_all(x, out, **options, **self.how(async_op))

    def gather(self):
        root, parts = self.op.root, [self.moved(rank, self.op.counts[0]) for rank in range(self.ranks)]
        x, out = self.put(parts[self.rank], dense=not self.native), None
        if self.is_root() and self.op.form == "flat" and self.native:
            out = self.get(_join(parts), dense=True)
        elif self.is_root():
            out = [self.get(part, dense=not self.native) for part in parts]
        if self.native:
            self.issue = lambda comm, async_op: comm.gather(x, out, root, **self.how(async_op))
        else:
            self.issue = lambda group, async_op: dist.gather(
                x, out, group=group, group_dst=root, async_op=async_op
            )

    def scatter(self):
        root, parts = self.op.root, [self.moved(rank, self.op.counts[0]) for rank in range(self.ranks)]
        out, x = self.get(parts[self.rank], dense=not self.native), None
        if self.is_root() and self.op.form == "flat" and self.native:
            x = self.put(_join(parts), dense=True)
        elif self.is_root():
            x = [self.put(part, dense=not self.native) for part in parts]
        if self.native:
            self.issue = lambda comm, async_op: comm.scatter(x, out, root, **self.how(async_op))
        else:
            self.issue = lambda group, async_op: dist.scatter(
                out, x, group=group, group_src=root, async_op=async_op
            )

    def mismatch(self):
        """An all_reduce to which one rank brings another size or dtype: nothing is written."""
        odd = self.rank == self.op.odd
        count = self.op.counts[0] + (odd and self.op.form == "count")
        dtype = torch.int32 if odd and self.op.form == "dtype" else torch.float32
        x = torch.full((count,), 7, dtype=dtype)
        self.unchanged = lambda: bool((x == 7).all())
        if self.native:
            self.issue = lambda comm, async_op: comm.all_reduce(x, async_op=async_op)
        else:
            self.issue = lambda group, async_op: dist.all_reduce(x, group=group, async_op=async_op)

    def coalesced(self):
        """Several calls of torch in one; of this kind there is no native one."""
        calls, op = [], self.reduction
        for part, count in enumerate(self.op.counts):
            inputs = values.to_reduce(self.program, self.op, count * self.ranks, self.ranks, part)
            if self.op.form == "all_reduce":
                x = self.change(inputs[self.rank], values.reduced(self.program, self.op, inputs))
                calls.append(functools.partial(dist.all_reduce, x, op=op))
            elif self.op.form == "all_gather":
                short = inputs[:, :count]
                out = self.get(_join(list(short)), dense=True)
                calls.append(functools.partial(all_gather_flat, out, self.put(short[self.rank], dense=True)))
            else:
                expected = values.reduced(self.program, self.op, inputs).view(self.ranks, count)
                out = self.get(expected[self.rank], dense=True)
                x = self.put(inputs[self.rank], dense=True)
                calls.append(functools.partial(reduce_scatter_flat, out, x, op=op))

        def issue(group, async_op):
            with _coalescing_manager(group, async_ops=async_op) as manager:
                for call in calls:
                    call(group=group)
            return manager if async_op else None

        self.issue = issue


def _join(parts):
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


def dtype_of(op):
    return DTYPES[op.dtype]
