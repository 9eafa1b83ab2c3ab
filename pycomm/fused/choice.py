"""Which form of a fused operation runs: a product and a collective (plain), the same in chunks that overlap
(chunked), or one kernel (fused).

All ranks must choose alike, or they would wait for different things. So the CPU's table looks only at what is
equal on all ranks: not at n in all_gather_matmul nor at k in the other two, which are each rank's part of a
weight and may differ.

[Note: CPU table] Speed relative to one product and one collective on ordinary memory, whose time is the first
column, in us. AMD EPYC, 2 vCPU, torch 2.13, 2 ranks with one thread each, forms in turns, medians of 3 to 15
turns of the slower rank. The machine was shared: one form differed from itself by up to 6 percent.
registered: one product, its partial sums in registered memory (plain.py). 2, 3, 4: chunks.

                            matmul_reduce_scatter         matmul_all_reduce      all_gather_matmul
                                                                                 (own piece, rest in 1, 2)
    dtype (M, N, K)            us  registered  2     4          us    2     4          us    2     3
    f32   (128, 256, 256)     206     -      0.59  0.47        198  0.70  0.58        212  0.75  0.61
    f32   (512, 512, 512)    3209   1.01     0.88  0.86       3046  0.93  0.88       3208  0.91  0.89
    f32   (1024, 1024, 256)  7466   1.11     0.94  0.92       6960  0.98  0.98       6676  0.98  0.97
    f32   (2048, 2048, 64)  17142   1.84     1.58  1.61      11038  0.93  1.02       7827  1.02  1.03
    f32   (256, 4096, 1024) 29962   1.00     0.71  0.56      28800  0.81  0.67      29997  0.89  0.72
    f32   (4096, 2048, 128) 44175     *      1.38  1.20      44924  0.99  0.95      37195  0.98  0.97
    f32 (4096, 2048, 2048) 832472     *      1.10  1.06     781222  0.97  0.96         not measured
    bf16  (512, 512, 512)    1518   1.01     0.79  0.67       1571  0.84  0.69       1512  0.82  0.81
    bf16  (2048, 2048, 64)   4481   1.19     1.18  1.15       4988  1.03  0.98       3360  0.86  0.95
    bf16 (2048, 1024, 2048) 41793   1.01     0.99  0.97      41443  0.99  0.98      42826  0.99  1.00
    bf16 (4096, 2048, 2048) 173682  0.99     1.01  1.01     169709  1.00  0.99     178930  1.00  0.92
    -: below LEAST_STAGING, ordinary memory. *: does not fit into MOST_STAGING; 4 chunks do.

So chunks do not win by overlap where there are as many ranks as cores: what a collective hides beside one
product it takes from another, since no core is free. Synchronous chunks were as fast or faster
(matmul_reduce_scatter, 2 chunks, f32 (1024, 1024, 256): 1.02 against 0.94; bf16 (2048, 2048, 64): 1.37
against 1.18). A product in parts is slower than the whole, and a collective is 1 to 10 percent of a call
whose K is in the hundreds, so there is little to hide. Chunks win in one case, by memory: where the partial
sums are too large to be registered whole. Not in the table: the checks and choices of a call, some 15 us of
Python (more with cold caches), which a product of 5 us notices.

CUDA: the thresholds below are not measured. They follow published figures for 8 GPUs, where fused kernels
lost to cuBLAS and NCCL under about 100 GFLOP per GPU and below 512 rows per rank (Triton-distributed PR 166:
0.52x at 4096 x 4096 x 8192, 1.23x at 8192 x 8192 x 29568; Kraken PRs 2 and 19). What the tuner (tuner.py)
measured on the machine comes before them; they decide below LEAST_TUNED_FLOPS, and while a graph is captured.
"""

from typing import Literal, NamedTuple, TypeAlias

import torch

from pycomm.fused.config import Config
from pycomm.fused.plain import MOST_STAGING
from pycomm.fused.problem import Problem

__all__ = ["Choice", "Forced", "Form", "choose"]

Form: TypeAlias = Literal["plain", "chunked", "fused"]
Forced: TypeAlias = Literal["auto", "plain", "chunked", "fused"]  # PYCOMM_FUSED

FORCED_CHUNKS = 3  # PYCOMM_FUSED=chunked: all_gather_matmul's own piece and two more

# matmul_reduce_scatter in chunks: from this many rows per rank and chunk on a product in parts is as fast as
# the whole.
LEAST_CHUNK_ROWS = 256

LEAST_TUNED_FLOPS = 1e9  # below, the launch decides, and plain is not slower
LEAST_FUSED_FLOPS = 100e9  # of this rank's product
LEAST_FUSED_ROWS = 512  # per rank
LEAST_EPILOGUE_FLOPS = (
    10e9  # plain matmul: below, launches decide, and cuBLAS with a second kernel is as good
)


class Choice(NamedTuple):
    name: Form
    chunks: int
    config: Config | None  # of the kernel; None: the default one
    reason: str
    open: bool = False  # kernels can run, and measuring may find better


def choose(
    problem: Problem,
    device: Literal["cpu", "cuda"] = "cpu",
    *,
    peer_memory: bool = True,
    obstacle: str = "",
    forced: Forced = "auto",
    triton: bool = True,
    interpreted: bool = False,
) -> Choice:
    """peer_memory: the group's backend is pycomm. obstacle: why kernels of different ranks cannot signal each
    other (machine.py) or none can be loaded (dispatch.py), or "". forced: PYCOMM_FUSED. triton: it is
    installed. interpreted: kernels can run on CPU tensors.
    """
    local = problem.op == "matmul" or problem.world_size == 1
    if forced == "plain":
        return _plain("PYCOMM_FUSED=plain")
    if forced == "chunked":
        return (
            _plain("PYCOMM_FUSED=chunked, but nothing is communicated")
            if local
            else Choice("chunked", FORCED_CHUNKS, None, "PYCOMM_FUSED=chunked")
        )
    if device == "cpu" and not (forced == "fused" and interpreted):
        if forced == "fused":
            return _plain(
                "PYCOMM_FUSED=fused, but kernels run on CPU tensors only in Triton's interpreter "
                "(TRITON_INTERPRET=1)"
            )
        return _plain("one process: no communication") if local else _on_cpu(problem)
    if not triton:
        return _plain("triton is not installed")
    if problem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return _plain(f"there is no kernel for {problem.dtype}")
    if not local and not peer_memory:
        return _plain("the group's backend is not pycomm, so peers' memory cannot be reached from a kernel")
    if obstacle:
        return _plain(obstacle)
    if forced == "fused":
        return Choice("fused", 1, None, "PYCOMM_FUSED=fused")
    return (_matmul_on_cuda(problem) if local else _on_cuda(problem))._replace(
        open=problem.flops >= LEAST_TUNED_FLOPS
    )


def _plain(reason: str) -> Choice:
    return Choice("plain", 1, None, reason)


def _on_cpu(problem: Problem) -> Choice:
    if problem.op != "matmul_reduce_scatter":
        return _plain(
            "beside products on all cores a collective overlaps nothing, and products in parts are slower"
        )
    nbytes = problem.m * problem.columns * problem.dtype.itemsize
    if nbytes <= MOST_STAGING:
        return _plain(f"{nbytes} bytes of partial sums fit into registered memory")
    chunks = -(-2 * nbytes // MOST_STAGING)  # two of them fit
    rows = problem.outer * max(problem.sizes) * problem.inner // chunks
    if rows < LEAST_CHUNK_ROWS:
        return _plain(f"{chunks} chunks would have {rows} rows per rank, below {LEAST_CHUNK_ROWS}")
    return Choice(
        "chunked", chunks, None, f"{nbytes} bytes of partial sums go through registered memory in parts"
    )


def _matmul_on_cuda(problem: Problem) -> Choice:
    epilogue = problem.activation is not None and (problem.bias or problem.panels == 2)
    if not epilogue:
        return _plain("cuBLAS: there is no bias with an activation, nor swiglu, to fuse")
    if problem.dtype == torch.float32:
        return _plain("cuBLAS: float32 has no fused kernel that is faster")
    if problem.flops < LEAST_EPILOGUE_FLOPS:
        return _plain(f"cuBLAS: {problem.flops / 1e9:.3g} GFLOP, below {LEAST_EPILOGUE_FLOPS / 1e9:.0f}")
    return Choice(
        "fused", 1, None, f"an epilogue on {problem.flops / 1e9:.3g} GFLOP saves passes over memory"
    )


def _on_cuda(problem: Problem) -> Choice:
    least_rows = LEAST_FUSED_ROWS * problem.world_size
    if problem.dtype == torch.float32:
        return _plain("float32: the product takes so long that there is little to hide")
    if problem.flops < LEAST_FUSED_FLOPS:
        return _plain(f"{problem.flops / 1e9:.3g} GFLOP on this rank, below {LEAST_FUSED_FLOPS / 1e9:.0f}")
    if problem.m < least_rows:
        return _plain(f"{problem.m} rows, below {LEAST_FUSED_ROWS} per rank")
    return Choice(
        "fused",
        1,
        None,
        f"{problem.flops / 1e9:.3g} GFLOP on this rank and {problem.m} rows: communication can be hidden",
    )
