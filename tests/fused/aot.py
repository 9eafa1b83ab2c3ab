"""Compiles the kernels of pycomm.fused ahead of time, for GPUs that are not here, as launch.py would launch
them.

    python tests/fused/aot.py quick|pairs|all --arch 80,90,100 --out records.jsonl

launch.py runs unchanged: its tensors have no memory (device "meta"), its communicator answers as if all ranks
agreed, and where it launches a kernel, Triton compiles instead, from the very arguments, with its own rules
of specialisation (integers that are 1 or divisible by 16, aligned pointers). A process of its own, since
Triton decides when a kernel is decorated whether it is for the interpreter.

One record (a line of JSON) per kernel: what it is, what ptxas says of registers and spills, shared memory,
instructions of the tensor cores, violations of ptx_check. tests/fused/test_aot.py has the rules for them.
"""

import argparse
import contextlib
import io
import itertools
import json
import re
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
from ptx_check import check, expected
from triton.backends.compiler import GPUTarget

from pycomm.fused import launch, loading
from pycomm.fused.config import SHARED_BYTES, Config, candidates, fitting
from pycomm.fused.context import Context
from pycomm.fused.machine import Machine
from pycomm.fused.problem import OPS, Problem
from pycomm.groups import even_sizes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PROGRAMS = {80: 108, 90: 132, 100: 148}  # multiprocessors of A100, H100, B200
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
ROUND, RAGGED = (8192, 4096, 4096), (8191, 4099, 4101)  # m, n, k: all divisible by 16, and none by 2


class Case(NamedTuple):
    """A kernel to compile."""

    op: str
    arch: int
    dtype: str
    config: Config
    activation: str | None = None
    bias: bool = True
    save: bool = False
    keep: bool = False  # all_gather_matmul
    ragged: bool = False
    outer: int = 1  # blocks of rows of a piece
    world_size: int = 8
    rank: int = 0  # 0 is divisible by 16, 1 a constant to Triton, others neither

    def __str__(self):
        config = "x".join(map(str, self.config[:3])) + f" {self.config.warps}/{self.config.stages}"
        more = [name for name in ("tma", "flatten", "specialize", "one_shot") if getattr(self.config, name)]
        more += [name for name in ("save", "keep", "ragged") if getattr(self, name)] + (
            [] if self.bias else ["no bias"]
        )
        where = f"rank {self.rank}/{self.world_size}" + (f" outer {self.outer}" if self.outer > 1 else "")
        return " ".join(
            [
                f"sm_{self.arch}",
                self.op,
                self.dtype,
                config,
                self.activation or "none",
                *more,
                f"movers={self.config.movers}",
                where,
            ]
        )


class Agreement:
    """A communicator of ranks that all pass the same."""

    timeout = 300.0

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def all_gather_flat(self, mine, everyone, *options):
        everyone[:] = mine

    def empty(self, shape, dtype, device):
        return torch.empty(shape, dtype=dtype, device=device)

    def enter_line(self, device):
        pass

    leave_line = enter_line

    def peer_addresses(self, tensor):
        return [0] * self.world_size


class Device:
    """What Triton asks its driver before it compiles."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0


def tensors(case, m, n, k):
    """a, b (a weight of nn.Linear, transposed), bias."""
    dtype, columns = DTYPES[case.dtype], n * (2 if case.activation == "swiglu" else 1)
    make = torch.empty(m, k, dtype=dtype, device="meta")
    return make, make.new_empty(columns, k).t(), make.new_empty(columns) if case.bias else None


def problem_of(case):
    m, n, k = RAGGED if case.ragged else ROUND
    sizes = (
        ()
        if case.op in ("matmul", "matmul_all_reduce")
        else tuple(even_sizes(m // case.outer, case.world_size))
    )
    m = case.outer * sum(sizes) if sizes else m
    return Problem(
        case.op,
        m,
        n,
        k,
        DTYPES[case.dtype],
        case.world_size,
        case.rank,
        case.activation,
        case.bias,
        outer=case.outer,
        sizes=sizes,
    )


def run(case):
    """Calls the operation as form.py does."""
    problem = problem_of(case)
    a, b, bias = tensors(case, problem.m, problem.n, problem.k)
    if case.op == "matmul":
        return launch.matmul(problem, a, b, bias, case.config, save=case.save)
    context = Context(
        Agreement(case.rank, case.world_size), "meta", Machine(case.arch, 1, PROGRAMS[case.arch], "")
    )
    if case.op != "all_gather_matmul":
        return getattr(launch, case.op)(problem, context, a, b, bias, case.config, save=case.save)
    piece = a[: problem.piece_rows[case.rank]]
    return launch.all_gather_matmul(
        problem, context, piece, b, bias, case.config, save=case.save, keep=case.keep
    )


def compile_instead(arch, programs):
    """From now on a launch compiles, for a GPU of so many multiprocessors. Returns the list to which kernels
    are appended.
    """
    compiled = []

    def compile_only(kernel, grid):
        return lambda *args, **options: compiled.append(kernel.run(*args, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(Device(arch))
    triton.JITFunction.__getitem__ = compile_only
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        multi_processor_count=programs, major=arch // 10
    )
    launch._options.cache_clear()
    loading._load = lambda *arguments: None  # there is no driver to load anything
    return compiled


def compile_case(case):
    """The compiled kernel of a case, and what ptxas said."""
    compiled, said = compile_instead(case.arch, PROGRAMS[case.arch]), io.StringIO()
    with contextlib.redirect_stdout(said):
        run(case)
    (kernel,) = compiled
    return kernel, said.getvalue()


def pointers_of(kernel):
    return [name for name, kind in kernel.src.signature.items() if kind.startswith("*")]


def facts(kernel, said, arch):
    """What the rules need to know of a compiled kernel."""
    text = kernel.asm["ptx"]
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "shared": kernel.metadata.shared,
        "shared_limit": SHARED_BYTES[arch],
        "tensor_cores": text.count(TENSOR_CORES[arch]),
    }


def record(case):
    found = {"name": str(case), "dtype": case.dtype, "triton": triton.__version__}
    try:
        kernel, said = compile_case(case)
        counts = expected(case.op, one_shot=case.config.one_shot, keep=case.keep)
        found |= facts(kernel, said, case.arch)
        found["violations"] = list(map(str, check(kernel.asm["ptx"], pointers_of(kernel), counts)))
        found["violations"] += filter(None, [loading.miscompiled(kernel)])
    except Exception:
        return found | {"failed": traceback.format_exc()[-4000:]}
    return found


def configs(op, dtype, arch, activation):
    """The shipped ones; those that differ by the number of programs alone once: it is a number in
    the kernel.
    """
    found = candidates(op, DTYPES[dtype], arch, 2 if activation == "swiglu" else 1, activation)
    return list(dict.fromkeys(config._replace(movers=16) for config in found))


def quick(arch):
    """Every shipped configuration in bfloat16, and with the first of them what else the code of a kernel
    depends on.
    """
    cases = []
    for op in OPS:
        shipped = configs(op, "bfloat16", arch, "gelu_tanh")
        cases += [Case(op, arch, "bfloat16", config, "gelu_tanh", rank=1) for config in shipped]
        cases.append(
            Case(
                op, arch, "bfloat16", configs(op, "bfloat16", arch, "swiglu")[0], "swiglu", save=True, rank=3
            )
        )
        cases.append(Case(op, arch, "bfloat16", configs(op, "bfloat16", arch, None)[-2], None, bias=False))
        cases.append(
            Case(op, arch, "float16", shipped[0], "gelu_tanh", save=True, keep=op == "all_gather_matmul")
        )
        outer = 2 if op in ("all_gather_matmul", "matmul_reduce_scatter") else 1
        cases.append(Case(op, arch, "float16", shipped[0], "silu", ragged=True, world_size=3, outer=outer))
        if (
            arch == 80
        ):  # the fewest registers per sum: two panels, a preactivation, and rows that come element by element
            for dtype in ("float32", "float16"):
                cases.append(
                    Case(
                        op,
                        arch,
                        dtype,
                        configs(op, dtype, arch, "swiglu")[0],
                        "swiglu",
                        save=True,
                        ragged=True,
                    )
                )
        if arch != 100:  # compiled like sm_90
            cases.append(
                Case(
                    op,
                    arch,
                    "float32",
                    configs(op, "float32", arch, "gelu")[0],
                    "gelu",
                    save=True,
                    world_size=2,
                )
            )
    return cases


def everything(arch):
    """Every configuration with everything that it is shipped for, as launch.py fits it to the case; what
    comes to the same once.
    """
    cases = [
        Case(
            op,
            arch,
            dtype,
            config,
            activation,
            save=save,
            keep=keep,
            ragged=ragged,
            world_size=2 if config.one_shot else 8,
        )
        for op in OPS
        for dtype in DTYPES
        for activation in (None, "gelu", "silu", "swiglu")
        for config in configs(op, dtype, arch, activation)
        for save in ((False, True) if activation else (False,))
        for ragged in (False, True)
        for keep in ((False, True) if op == "all_gather_matmul" else (False,))
    ]
    return list(
        dict.fromkeys(
            case._replace(config=fitting(problem_of(case), case.config, case.save)) for case in cases
        )
    )


def pairs(arch):
    """As few of everything as hold each two of their properties together (config and dtype, activation and
    ragged, ...): about a third, chosen greedily, the same in every run.
    """

    def held(case):
        own = [
            (name, getattr(case, name)) for name in ("op", "dtype", "activation", "save", "keep", "ragged")
        ]
        return set(itertools.combinations([*own, ("config", (case.op, case.config))], 2))

    cases = {case: held(case) for case in everything(arch)}
    missing, chosen = set().union(*cases.values()), []
    while missing:
        best = max(cases, key=lambda case: len(cases[case] & missing))
        chosen.append(best)
        missing -= cases[best]
    return chosen


CASES = {"quick": quick, "pairs": pairs, "all": everything}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", choices=CASES)
    parser.add_argument("--arch", default="80,90,100")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        options.out.open("w") as out,
    ):  # ptxas says nothing of what Triton finds in its cache
        triton.knobs.cache.dir, triton.knobs.nvidia.dump_ptxas_log = folder, True
        for arch in map(int, options.arch.split(",")):
            for case in CASES[options.cases](arch):
                print(json.dumps(record(case)), file=out, flush=True)


if __name__ == "__main__":
    main()
