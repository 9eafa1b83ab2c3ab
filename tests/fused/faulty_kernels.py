"""Kernels with planted faults, compiled for test_ptx_check.py, which must find each; and clean ones, whose
PTX it edits.

python tests/fused/faulty_kernels.py folder         writes kernels.json
"""

import json
import sys
import tempfile
from pathlib import Path

import aot
import torch
import triton
import triton.language as tl

from pycomm.fused.config import Config
from pycomm.fused.kernels.signal import post, staging_of, wait_for, words_of

ARCH = 90

# What the kernel below does wrong, and the rule that says so. Without a barrier: by an edit of the PTX, since
# Triton 3.9 adds one itself.
FAULTS = {
    "none": None,
    "release of the gpu": "post",
    "relaxed signal": "ways",
    "signal before the data": "post",
    "address without alignment": "width",
    "plain load, whose loop is deleted": "wait",
    "volatile load": "ways",
    "acquire of the gpu": "wait",
    "relaxed loop": "ways",
    "one look": "wait",
    "loop that ends by a counter": "wait",
    "no wait": "wait",
}


@triton.jit
def exchange(
    x, out, table, local, record, limit, rank, epoch, offset, SIZE: tl.constexpr, FAULT: tl.constexpr
):
    """Two ranks give each other SIZE elements."""
    peer = 1 - rank
    lanes = tl.arange(0, SIZE)
    values = tl.load(x + lanes)
    target = staging_of(table, peer, offset, tl.float32)
    if FAULT == "address without alignment":
        target = (tl.load(table + peer) + offset).to(tl.pointer_type(tl.float32))
    word = words_of(table, peer) + rank
    if FAULT == "signal before the data":
        post(word, epoch)
        tl.store(target + lanes, values)
    else:
        tl.store(target + lanes, values)
        if FAULT == "release of the gpu":
            tl.debug_barrier()
            tl.atomic_xchg(word, epoch, sem="release", scope="gpu")
        elif FAULT == "relaxed signal":
            tl.debug_barrier()
            tl.atomic_xchg(word, epoch, sem="relaxed", scope="sys")
        else:
            post(word, epoch)
    word = words_of(table, rank) + peer
    if FAULT == "plain load, whose loop is deleted":
        while tl.load(word) < epoch:
            pass
    elif FAULT == "volatile load":
        while tl.load(word, volatile=True) < epoch:
            pass
    elif FAULT == "acquire of the gpu":
        while tl.atomic_add(word, 0, sem="acquire", scope="gpu") < epoch:
            pass
    elif FAULT == "relaxed loop":
        while tl.atomic_add(word, 0, sem="relaxed", scope="sys") < epoch:
            pass
    elif FAULT == "one look":
        if tl.atomic_add(word, 0, sem="acquire", scope="sys") < epoch:
            tl.store(record, 1)
    elif FAULT == "loop that ends by a counter":
        for _ in range(limit):
            if tl.atomic_add(word, 0, sem="acquire", scope="sys") < epoch:
                tl.store(record, 1)
    elif FAULT != "no wait":
        wait_for(word, epoch, local, record, limit, peer, 1)
    tl.store(out + lanes, tl.load(staging_of(table, rank, offset, tl.float32) + lanes))


def compile_exchange(fault):
    triton.runtime.driver.set_active(aot.Device(ARCH))
    words, data = torch.empty(16, dtype=torch.int32, device="meta"), torch.empty(1024, device="meta")
    table = torch.empty(2, dtype=torch.int64, device="meta")
    return exchange.run(
        data,
        data,
        table,
        words,
        words,
        5,
        0,
        3,
        4096,
        SIZE=1024,
        FAULT=fault,
        num_warps=4,
        grid=(1,),
        warmup=True,
    )


# Configurations that nobody ships. Spills: an accumulator of 256 x 256 by four warps. Shared memory: five
# stages of 96 KiB.
OVERSIZED = {
    "spilled": aot.Case("matmul_reduce_scatter", 90, "bfloat16", Config(256, 256, 64, warps=4, tma=True)),
    "shared memory": aot.Case(
        "matmul_reduce_scatter", 90, "bfloat16", Config(128, 256, 128, stages=5, tma=True)
    ),
}


def main(folder):
    found = {"exchange": {}, "oversized": {}, "clean": {}}
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir, triton.knobs.nvidia.dump_ptxas_log = cache, True
        for name, case in OVERSIZED.items():
            found["oversized"][name] = aot.record(case)
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            config = aot.configs(op, "bfloat16", ARCH, "gelu_tanh")[0]
            kernel, _ = aot.compile_case(aot.Case(op, ARCH, "bfloat16", config, "gelu_tanh"))
            found["clean"][op] = {"ptx": kernel.asm["ptx"], "pointers": aot.pointers_of(kernel)}
        triton.knobs.nvidia.dump_ptxas_log = False
        for fault in FAULTS:
            kernel = compile_exchange(fault)
            found["exchange"][fault] = {
                "ptx": kernel.asm["ptx"],
                "pointers": aot.pointers_of(kernel),
                "rule": FAULTS[fault],
            }
    (folder / "kernels.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
