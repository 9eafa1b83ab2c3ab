"""Values of pycomm.fused: the kernels in their configurations, the public functions with gradients; the tuner
and its cache.

Most of the time of these checks goes into compiling, so on a GPU the parts run side by side, each a process
with ranks as its threads: the kernels of one process run together, those of different processes take turns on
the GPU. On host tensors the same bodies run the plain form, whole and in chunks: there are no kernels, since
Triton's interpreter does not run in threads.
"""

import multiprocessing
import os
import zlib

import torch

from gpu import fused_cases
from gpu.fused_cases import COLLECTIVES
from gpu.ranks import Check, settle
from pycomm import fused
from pycomm.fused import form as fused_form
from pycomm.fused.choice import Choice
from pycomm.fused.loading import Miscompiled
from pycomm.fused.ranks import of

TURNS = 3  # calls of a case with new inputs, back to back; then the first one again
PATIENCE = 60.0  # seconds of an operation: ranks wait for each other while one compiles
WORLD_SIZES = {"cuda": (2, 4, 8), "cpu": (2, 3)}


def values(check):
    parts = [
        ("matmul", 1),
        *((op, n) for n in WORLD_SIZES[check.on] for op in COLLECTIVES),
        ("gradients", 2),
        ("gradients", 4),
    ]
    if check.now == "threads":
        (_apart if check.on == "cuda" else _here)(check, parts)


def _here(check, parts):
    for what, n in parts:
        if what == "gradients":
            check.each("pycomm.fused and its gradients", n, _gradients, timeout=PATIENCE)
        else:
            check.each(f"{what}, every case", n, _values, what, timeout=PATIENCE)


def _apart(check, parts):
    """Every part in a new process, all at once."""
    context = multiprocessing.get_context("spawn")
    children = {}
    for part in parts:
        process = context.Process(
            target=_part,
            args=(check.name, check.path, check.on, max(1.0, check.left() - 2.0), part),
            daemon=True,
        )
        process.start()
        children[part] = process
    for (what, n), process in children.items():
        process.join(max(0.1, check.left() - 1.0))
        late = process.is_alive()
        if late:
            process.kill()
            process.join(1.0)
        if late or process.exitcode:
            text = (
                "did not end in time"
                if late
                else f"ended with {process.exitcode}; records of its own, if any, say why"
            )
            check.record(f"{what} with {n} ranks, in a process", False, text)


def _part(name, path, on, seconds, part):
    torch.set_num_threads(1)
    check = Check(name, path, on=on, seconds=seconds)
    check.now = "threads"
    _here(check, [part])
    os._exit(1 if check.failed else 0)  # a rank that hangs must not keep the process


# --- forms --------------------


def config_named(name, problem):
    """A configuration of the kernel for this GPU."""
    from pycomm.fused.config import default

    major, minor = torch.cuda.get_device_capability()
    config = default(
        problem.op, problem.dtype, 10 * major + minor, problem.world_size, problem.panels, problem.activation
    )
    small = config._replace(block_m=64, block_n=64, block_k=32, warps=4, stages=2, movers=2)
    return {
        "default": config,
        "pointers": config._replace(tma=False, flatten=False),
        "small": small,
        "crowded": small._replace(
            movers=1024
        ),  # more than run at the same time: they come after those that multiply
        "one_shot": small._replace(one_shot=True),
        "two_shot": small._replace(one_shot=False),
    }[name]


def forms(check, case, problem):
    """{name: Choice}: configurations of the kernel on a GPU; on the host the plain form, whole and
    in chunks.
    """
    if check.on == "cuda":
        return {name: Choice("fused", 1, config_named(name, problem), "forced") for name in case.configs}
    found = {"plain": Choice("plain", 1, None, "forced")}
    return found if case.op == "matmul" else found | {"chunked": Choice("chunked", 3, None, "forced")}


def run_form(problem, form, ranks, a, b, bias, *, save=False, keep=False):
    """(result, preactivation or None, gathered input or None) of one form."""
    return fused_form.run(problem, form, a, b, bias, ranks, save=save, keep=keep)


# --- bodies --------------------


def _values(comm, check, op):
    """Every case in every form: TURNS inputs one after the other without waiting, then the first again, which
    must give the same bits.
    """
    n, rank, ranks = comm.world_size, comm.rank, of(comm, check.on)
    table = fused_cases.matmul_cases() if op == "matmul" else fused_cases.collective_cases(op, n)
    failed = 0
    for case in table:
        problem = case.problem(n, rank)
        drawn = [fused_cases.draw(case, n, turn) for turn in range(TURNS)]
        inputs = [tuple(None if x is None else check.tensor(x) for x in tensors[rank]) for tensors in drawn]
        wanted = [fused_cases.expected(case, tensors, rank) for tensors in drawn]
        for name, form in forms(check, case, problem).items():
            settle(check, comm)
            try:
                got = [
                    run_form(problem, form, ranks, *x, save=case.save, keep=case.keep)
                    for x in [*inputs, inputs[0]]
                ]
            except Miscompiled as refusal:
                # Of a tile that only this check uses; what is shipped must compile right.
                shipped = name in ("default", "pointers")
                check.record(f"{case}, {name}, {n} ranks", False if shipped else None, refusal)
                failed += shipped
                continue
            settle(check, comm)
            problems = [
                fused_cases.wrong(case, mine, want)
                for mine, want in zip(got, [*wanted, wanted[0]], strict=True)
            ]
            problems.append(
                "" if torch.equal(got[0][0], got[-1][0]) else "the same call again gives other bits"
            )
            problems.append(_bits_differ(comm, got) if op == "matmul_all_reduce" else "")
            problems = [text for text in problems if text]
            failed += bool(problems)
            if problems or rank == 0:
                check.record(
                    f"{case}, {name}, {n} ranks",
                    not problems,
                    f"rank {rank}: {problems[0]}" if problems else "",
                )
    return f"{failed} failed" if failed else ""


def _bits_differ(comm, results):
    mine = torch.tensor([zlib.crc32(x[0].cpu().view(torch.uint8).numpy().tobytes()) for x in results])
    everyone = comm.all_gather(mine).view(comm.world_size, -1)
    return "" if (everyone == everyone[0]).all() else "ranks hold different bits"


def _gradients(comm, check):
    """The public functions on pieces of the middle dimension of a batch, against autograd in float64 in one
    process.
    """
    n, rank = comm.world_size, comm.rank
    sizes = [5 + 40 * r for r in range(n)]
    problems = []
    for op in ("matmul", *COLLECTIVES):
        for dtype, activation in (("bfloat16", "gelu_tanh"), ("float16", "swiglu"), ("float32", None)):
            case = fused_cases.Case(op, tuple(sizes), 48, 32, dtype, activation, True, outer=3)
            tensors = fused_cases.draw(case, n, 5)
            want = _autograd(case, tensors, rank)
            a, b, bias = (check.tensor(x).detach() for x in tensors[rank])
            a = a.view(3, -1, 32)
            inputs = [x.requires_grad_() for x in (a, b, bias)]
            weights = check.tensor(_weights(case, n, rank))
            settle(check, comm)
            more = {"dim": 1, "sizes": sizes} if op in COLLECTIVES[:2] else {}
            group = () if op == "matmul" else (comm,)
            out = getattr(fused, op)(a, b, *group, bias=bias, activation=activation, **more)
            got = [out.detach(), *torch.autograd.grad(out, inputs, weights.view_as(out))]
            settle(check, comm)
            for what, mine, theirs in zip(
                ("result", "grad a", "grad b", "grad bias"), got, want, strict=True
            ):
                worst = (mine.cpu().double().flatten() - theirs.flatten()).abs().max() / max(
                    1.0, theirs.abs().max()
                )
                if not worst <= 2 * fused_cases.TOLERANCES[dtype]:
                    problems.append(f"{op} {dtype} {activation}: {what} differs by {worst:.2g}")
    return "; ".join(problems[:3])


def _weights(case, n, rank):
    """The gradient of a rank's result; that of matmul_all_reduce is equal on all ranks."""
    rows = case.outer * (case.sizes[rank] if case.op == "matmul_reduce_scatter" else sum(case.sizes))
    generator = torch.Generator().manual_seed(rank if case.op != "matmul_all_reduce" else 99)
    return torch.randn(rows, case.n, generator=generator, dtype=torch.float64).to(getattr(torch, case.dtype))


def _autograd(case, tensors, rank):
    """[result, gradients of a, b, bias] of a rank, of the sum over all ranks that count (matmul and
    matmul_all_reduce: this one alone).
    """
    n = len(tensors)
    wide = [tuple(x.double().requires_grad_() for x in own) for own in tensors]
    if case.op in COLLECTIVES[1:]:  # one bias for all
        wide = [(a, b, wide[0][2]) for a, b, _ in wide]
    if case.op == "matmul":
        outs = {rank: fused_cases.expected(case, [wide[rank]], 0)[0]}
    else:
        counted = (rank,) if case.op == "matmul_all_reduce" else range(n)
        outs = {r: fused_cases.expected(case, wide, r)[0] for r in counted}
    loss = sum((out * _weights(case, n, r).double()).sum() for r, out in outs.items())
    return [outs[rank].detach(), *torch.autograd.grad(loss, wide[rank])]
