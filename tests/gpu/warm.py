"""Compiles, without a GPU, the Triton kernels that gpu-check launches, into the cache that TRITON_CACHE_DIR
names:

    python tests/gpu warm --arch 90 [--programs 132] [--part values|bench]

The arguments are those of launch.py on tensors that have no memory (tests/fused/aot.py); so is what Triton
makes a kernel's name in its cache of. What is missing there is compiled when it is launched, as ever.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "fused"))

WORLD_SIZES = (2, 4, 8)
DEVICE_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
MOST_PLACES = 64  # of a rank of a group: max_blocks in csrc/cuda/kernels/layout.h
SHAPES = {"matmul": ((8192,) * 3, (4096,) * 3), "others": ((8192, 8192, 1024), (512, 8192, 1024))}


def tensors(case, problem):
    """a, b, bias as the checks make them (fused_cases.draw)."""
    dtype = problem.dtype
    rows = problem.piece_rows[problem.rank] if problem.op == "all_gather_matmul" else problem.m
    a = torch.empty(rows, problem.k, dtype=dtype, device="meta")
    dense = case is not None and case.dense
    b = a.new_empty(problem.k, problem.columns) if dense else a.new_empty(problem.columns, problem.k).t()
    return a, b, a.new_empty(problem.columns) if problem.bias else None


def of_values_problems():
    """(problem, case) of fused_values and fused_order."""
    from gpu import fused_cases

    tables = [(1, fused_cases.matmul_cases())]
    tables += [(n, fused_cases.collective_cases(op, n)) for n in WORLD_SIZES for op in DEVICE_OPS]
    for n, table in tables:
        for case in table:
            yield case.problem(n, 0), case


def of_values():
    """(problem, configuration, tensors, options) of these."""
    from gpu import fused_values

    for problem, case in of_values_problems():
        for name in case.configs:
            keep = {"keep": case.keep} if case.op == "all_gather_matmul" else {}
            config = fused_values.config_named(name, problem)
            yield problem, config, tensors(case, problem), {"save": case.save, **keep}


def of_bench(arch):
    """The same of what the tuner measures in the benchmarks."""
    from pycomm.fused.config import candidates
    from pycomm.fused.problem import Problem
    from pycomm.groups import even_sizes

    for op in ("matmul", *DEVICE_OPS):
        for n in (1,) if op == "matmul" else WORLD_SIZES:
            for m, columns, k in SHAPES.get(op, SHAPES["others"]):
                for activation in (None, "gelu_tanh", "swiglu"):
                    cut = op in ("all_gather_matmul", "matmul_reduce_scatter")
                    sizes = tuple(even_sizes(m, n)) if cut else ()
                    product = (op, m, columns, k, torch.bfloat16, n, 0)
                    problem = Problem(*product, activation, activation is not None, sizes=sizes)
                    found = candidates(op, torch.bfloat16, arch, problem.panels, activation)
                    for config in dict.fromkeys(found):
                        yield problem, config, tensors(None, problem), {}


def compile_one(aot, given, job):
    from pycomm.fused import launch
    from pycomm.fused.context import Context
    from pycomm.fused.machine import Machine

    problem, config, operands, options = job
    n = problem.world_size
    if problem.op == "matmul":
        launch.matmul(problem, *operands, config, **options)
        return
    programs = min(given.programs // n, MOST_PLACES) if n > 1 else given.programs
    machine = Machine(given.arch, n, programs, "", threads=True)
    context = Context(aot.Agreement(problem.rank, n), "meta", machine)
    getattr(launch, problem.op)(problem, context, *operands, config, **options)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python tests/gpu warm", description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--programs", type=int, default=132, help="multiprocessors")
    parser.add_argument("--part", choices=("values", "bench"), help="of the kernels; both, where left out")
    parser.add_argument("--most", type=int, help="so many launches")
    given = parser.parse_args(arguments)
    import aot

    aot.compile_instead(given.arch, given.programs)
    torch.cuda.get_device_capability = lambda device=None: divmod(given.arch, 10)
    jobs = [job for part, make in (("values", of_values), ("bench", lambda: of_bench(given.arch)))
            if given.part in (None, part) for job in make()]  # fmt: skip
    refused = 0
    for number, job in enumerate(jobs[: given.most]):
        try:
            compile_one(aot, given, job)
        except Exception as error:  # the tuner passes over it, too
            refused += 1
            print(f"{job[0].op} {job[1]}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        if number % 20 == 19:
            print(f"{number + 1} of {len(jobs)} launches", flush=True)
    print(f"{len(jobs[: given.most])} launches, {refused} refused")
    return 0
