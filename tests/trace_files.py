"""Writes files of a trace as csrc/trace/record.h describes them, for tests of what reads them."""

import json
import os
import struct

from pycomm import _C

HEADER = struct.Struct("<5Q64s3Q")
HEADER_BYTES, TEXT_BYTES, STAMP_BITS, MASK = 4096, 256 << 10, 24, (1 << 64) - 1
MAGIC = int.from_bytes(b"pctrace1", "little")


def checksum(words):
    total = 0
    for word in words[1:]:
        total = ((total ^ word) * 0x9E3779B97F4A7C15) & MASK
    return total >> (64 - STAMP_BITS)


class FileWriter:
    """One process's file. Times in nanoseconds."""

    def __init__(self, folder, host="here#1", pid=1, capacity=1024, clock=0, day=0):
        self.path = os.path.join(folder, f"{host}-{pid}.pytrace")
        self.head = [MAGIC, capacity, pid, clock, day, host.encode()]
        self.records, self.text, self.capacity = [], "", capacity

    def line(self, **entry):
        self.text += json.dumps(entry) + "\n"

    def group(self, number, name="world", rank=0, world_size=1, host="", members=0):
        who = {"name": name, "rank": rank, "world_size": world_size, "host": host}
        self.line(group=number, **who, members=members)

    def name(self, number, name):
        self.line(span=number, name=name)

    def operation(self, sequence, issued, begun, arrived, ended, **fields):
        """fields: waited, nbytes, last, group, kind (a name), algorithm, type, outcome."""
        waited, nbytes = fields.get("waited", 0), fields.get("nbytes", 0)
        kind = _C.kinds.index(fields.get("kind", "all_reduce"))
        outcome = fields.get("outcome", 1 if ended else 0)
        word = sequence | fields.get("group", 0) << 32 | kind << 48 | fields.get("algorithm", 0) << 52
        word |= fields.get("type", 1) << 56 | outcome << 60
        last = fields.get("last", 0xFFFF)
        self.records.append([0, issued, begun, arrived, ended, waited, nbytes | last << 48, word])

    def on_device(self, sequence, issued, seen, begin, end, **fields):
        """begin, end: by the device's clock; fields: in_stream, clock, and those of operation()."""
        fields = {"type": 4, "last": fields.pop("clock", 0 if begin else 0xFFFF), **fields}
        self.operation(
            sequence, issued, seen, begin, fields.pop("in_stream", issued + 1), waited=end, **fields
        )

    def span(self, name, begin, end, *, thread=1, stage=-1, microbatch=-1, bucket=-1):
        word = name | 3 << 56
        self.records.append([0, begin, end, thread, stage + 1, microbatch + 1, bucket + 1, word])

    def write(self, closed=1, tear=()):
        """tear: tickets whose records are left as a writer that died in the middle leaves them."""
        ring = bytearray(self.capacity * 64)
        for ticket, words in enumerate(self.records):
            words[0] = (ticket + 1) << STAMP_BITS | checksum(words)
            if ticket in tear:
                words[3] ^= 1
            struct.pack_into("<8Q", ring, ticket % self.capacity * 64, *words)
        text = self.text.encode()
        head = bytearray(HEADER_BYTES)
        HEADER.pack_into(head, 0, *self.head, len(text), 0, closed)
        struct.pack_into("<Q", head, 128, len(self.records))
        with open(self.path, "wb") as file:
            file.write(head + text.ljust(TEXT_BYTES, b"\0") + ring)
