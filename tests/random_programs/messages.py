"""The messages of a strand: one end of each is a Transfer, which a strand treats as it does a Call."""

import torch.distributed as dist
from collective_cases import difference, same

from random_programs import values
from random_programs.waiting import All, WrongError


class Transfer:
    """One end of a message: the same to its strand as a Call."""

    def __init__(self, strand, op, part, count, sends):
        self.expected, self.sends, self.source = values.moved(strand.program, op, part, count), sends, None
        self.buffer = strand.buffer(op)(count, values=self.expected if sends else None)

    def differences(self):
        if not same(self.buffer.tensor, self.expected):
            yield difference("sent" if self.sends else "received", self.buffer.tensor, self.expected)
        if not self.buffer.guards_kept():
            yield "memory around the message was written"

    def end(self):
        self.buffer.end()


class Unknown(Transfer):
    """What is received from any source: which message it is shows in its source."""

    def __init__(self, strand, op, k, count):
        super().__init__(strand, op, 0, count, False)
        self.k, self.got = k, None

    def differences(self):
        self.got = self.buffer.tensor.clone()
        return iter(())


class Batch:
    def __init__(self, transfers):
        self.transfers = transfers

    def differences(self):
        for transfer in self.transfers:
            yield from transfer.differences()

    def end(self):
        for transfer in self.transfers:
            transfer.end()


class Messages:
    """The part of a Strand that sends and receives."""

    def peer(self, op, sends, peer):
        """Arguments of a message for this front end."""
        name = "dst" if sends else "src"
        if peer is None:
            return {"src": None}
        return {name: peer} if self.native(op) else {f"group_{name}": peer}

    def post(self, op, transfer, peer, async_op=True):
        """(Work or source, error)"""
        tensor, handle = transfer.buffer.tensor, self.handle(op)
        how = {**self.peer(op, transfer.sends, peer), "tag": op.tag}
        if self.native(op):
            call = handle.send if transfer.sends else handle.recv
            return self.attempt(op, call, tensor, async_op=async_op, **how)
        calls = (dist.isend, dist.send) if transfer.sends else (dist.irecv, dist.recv)
        return self.attempt(op, calls[not async_op], tensor, group=handle, **how)

    def send(self, op):
        self.message(op, True, op.peers[1], op.times[1] < op.times[0])

    def receive(self, op):
        peer = None if op.form == "any" else op.peers[0]
        self.message(op, False, peer, op.times[0] < op.times[1])

    def message(self, op, sends, peer, may_block):
        transfer = Transfer(self, op, 0, op.counts[0], sends)
        async_op = not may_block or self.local(op, "issue").random() < 0.6
        result, error = self.post(op, transfer, peer, async_op)
        if error:
            return
        if async_op:
            self.wait_later(op, [(transfer, result)])
            return
        if not sends:
            members = self.program.group(op).members
            source = op.peers[0] if self.native(op) else members[op.peers[0]]
            if result != source:
                raise WrongError(f"received from rank {result} instead of {source}")
        self.check(op, transfer)

    def exchange(self, op):
        me, transfers = self.own_rank(op), []
        for part, (src, dst, count) in enumerate(op.peers):
            if me in (src, dst):
                transfers.append((Transfer(self, op, part, count, me == src), dst if me == src else src))
        order = self.local(op, "order")
        pairs = [(src, dst) for src, dst, _ in op.peers]
        if len(set(pairs)) == len(pairs):  # else equal tags: in order
            order.shuffle(transfers)
        if self.native(op):
            posted = [(transfer, self.post(op, transfer, peer)) for transfer, peer in transfers]
            works = [(transfer, work) for transfer, (work, error) in posted if error is None]
            if works:
                self.wait_later(op, works)
        elif transfers:
            batch = [
                dist.P2POp(
                    dist.isend if transfer.sends else dist.irecv, transfer.buffer.tensor,
                    group=self.handle(op), tag=op.tag, group_peer=peer,
                )
                for transfer, peer in transfers
            ]  # fmt: skip
            works, error = self.attempt(op, dist.batch_isend_irecv, batch)
            if error is None:
                self.wait_later(op, [(Batch([transfer for transfer, _ in transfers]), All(works))])

    def fan_in_send(self, op):
        me, (count, each) = self.own_rank(op), op.counts
        transfers = [Transfer(self, op, me * 100 + k, count, True) for k in range(each)]
        posted = [(transfer, self.post(op, transfer, op.root)) for transfer in transfers]
        works = [(transfer, work) for transfer, (work, error) in posted if error is None]
        if works:
            self.wait_later(op, works)

    def fan_in_receive(self, op):
        count, each = op.counts
        works = []
        for k in range(each * len(op.peers)):
            transfer = Unknown(self, op, k, count)
            work, error = self.post(op, transfer, None)
            if error is None:
                works.append((transfer, work))
        if works:
            self.wait_later(op, works)

    def check_sources(self, op, received):
        """Those of one source, in the order in which they were posted, are what it sent, in its order."""
        received = sorted((call for call in received if isinstance(call, Unknown)), key=lambda call: call.k)
        if self.program.gone or not received:
            return
        number = dict.fromkeys(op.peers, 0)
        for transfer in received:
            if transfer.source not in number:
                raise WrongError(f"a message from rank {transfer.source}, expected ranks {op.peers}")
            part = transfer.source * 100 + number[transfer.source]
            number[transfer.source] += 1
            expected = values.moved(self.program, op, part, op.counts[0])
            if not same(transfer.got, expected):
                text = difference(f"#{number} of {transfer.source}", transfer.got, expected)
                raise WrongError(f"from any source: {text}")
        if set(number.values()) != {op.counts[1]}:
            raise WrongError(f"messages by source: {number}, expected {op.counts[1]} of each")
