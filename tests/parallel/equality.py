"""Every strategy alone, and hybrids of them, against a single process: the same loss, gradients and
parameters.

    python tests/parallel/equality.py          runs all plans in fp32 and fp64 and writes docs/equality.md

Each run is 10 steps on batches of 13 rows in 3 microbatches (so that ranks and microbatches differ in rows),
with a third of the targets ignored at random (so that they differ in tokens), clipping that acts, tied
weights, and sizes that nothing divides. The reference is plain torch in one process. fp32 runs use SGD with
momentum; fp64 runs AdamW, which divides by the size of each gradient and so shows errors in small ones.

An error is the L2 norm of the difference of a tensor over the L2 norm of that tensor in the reference; the
largest over all tensors, ranks and steps is shown. (The reference in fp32 itself differs from its fp64 run by
up to 6e-7.)
"""

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parallel")]

import models  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import spawn  # noqa: E402

import pycomm.parallel as par  # noqa: E402

STEPS, ROWS, LENGTH, MICROBATCHES, CLIP = 10, 13, 11, 3, 0.5
FEW_STEPS = 4  # of the quick tests: an optimizer's state is used again, and each buffer of a pair
LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}

ALONE = [
    ("gpt", "dp=2"),
    ("gpt", "dp=3,grad_sync=naive"),
    ("gpt", "dp=3,bucket_mb=0.004"),
    ("gpt", "dp=2,zero=1"),
    ("gpt", "dp=3,zero=2,bucket_mb=0.004"),
    ("gpt", "dp=2,zero=3"),
    ("gpt", "dp=2,zero=3,offload=parameters"),
    ("gpt", "dp=2,zero=1,offload=optimizer"),
    ("gpt", "tp=2"),
    ("llama", "tp=4"),
    ("gpt", "tp=3,megatron_sp"),
    ("gpt", "pp=2,schedule=gpipe"),
    ("gpt", "pp=3,schedule=1f1b"),
    ("gpt", "pp=4,schedule=1f1b"),
    ("gpt", "pp=2,schedule=interleaved"),
    ("gpt", "pp=3,schedule=zb-h1,stages=1:2:1"),
    ("gpt", "pp=2,schedule=zbv"),
    ("llama", "ulysses=2"),
    ("llama", "ulysses=4"),
    ("llama", "ring=3"),
    ("gpt", "ring=2,zigzag=false"),
    ("moe", "ep=2"),
    ("moe", "ep=4"),
    ("sequential", "pp=4,schedule=zb-h1"),
    ("sequential", "tp=2,megatron_sp"),
]
HYBRIDS = [
    ("llama", "ring=2,ulysses=2"),
    ("gpt", "dp=2,tp=2"),
    ("gpt", "dp=2,pp=2"),
    ("gpt", "tp=2,pp=2"),
    ("gpt", "tp=2,pp=2,megatron_sp,checkpoint"),
    ("gpt", "dp=2,tp=2,pp=2,zero=1"),
    ("gpt", "dp=2,tp=2,pp=2,zero=2,schedule=zb-h1"),
    ("gpt", "dp=2,tp=2,pp=2,zero=3,schedule=zbv"),
    ("gpt", "dp=2,pp=2,zero=2"),
    ("gpt", "dp=2,pp=2,zero=3"),
    ("gpt", "dp=2,pp=3,zero=3,schedule=zb-h1"),
    ("gpt", "dp=2,pp=2,zero=3,schedule=interleaved,checkpoint"),
    ("gpt", "dp=2,tp=2,zero=1"),
    ("gpt", "dp=2,tp=2,zero=2,megatron_sp"),
    ("gpt", "dp=2,tp=2,zero=3,megatron_sp,checkpoint"),
    ("llama", "dp=2,tp=3,zero=3"),
    ("llama", "dp=2,ulysses=2,zero=1"),
    ("llama", "dp=2,ulysses=3,zero=3"),
    ("llama", "dp=2,ring=2,zero=2"),
    ("llama", "dp=2,ring=2,ulysses=2,zero=3"),
    ("llama", "pp=2,ring=2"),
    ("llama", "pp=3,ulysses=2,schedule=zb-h1"),
    ("gpt", "pp=2,ring=2,ulysses=2,checkpoint"),
    ("llama", "tp=2,ring=2"),
    ("llama", "tp=2,ulysses=2,megatron_sp"),
    ("llama", "tp=2,ring=2,ulysses=2,megatron_sp"),
    ("llama", "tp=2,pp=2,ring=2,zero=1"),
    ("llama", "dp=2,tp=2,ulysses=2,zero=3"),
    ("moe", "dp=2,ep=2"),
    ("moe", "dp=2,ep=2,zero=3"),
    ("moe", "ep=3,pp=2,zero=2"),
    ("moe", "ep=2,tp=2,zero=1"),
    ("moe", "ep=2,tp=2,megatron_sp"),
    ("moe", "ep=2,ulysses=2,zero=3"),
    ("moe", "dp=2,ep=2,pp=2,zero=3,schedule=zb-h1"),
    ("moe", "ep=2,tp=2,pp=2,zero=2"),
    ("sequential", "dp=2,tp=2,pp=2,zero=3,megatron_sp"),
]


class Errors(NamedTuple):
    loss: float
    norm: float
    gradients: float
    parameters: float


def make_model(kind, dtype):
    torch.manual_seed(0)
    if kind == "gpt":
        model = models.GPT()
    elif kind == "llama":
        model = models.Llama()
    elif kind == "sequential":
        blocks = [models.Block(24, 3, 40) for _ in range(3)]
        model = nn.Sequential(nn.Embedding(37, 24), *blocks, nn.LayerNorm(24), nn.Linear(24, 37))
    else:
        model = models.Llama(
            mlp=lambda: par.MoE(
                24,
                lambda: nn.Sequential(nn.Linear(24, 20), nn.SiLU(), nn.Linear(20, 24)),
                5,
                top_k=2,
                aux_loss=0.05,
            )
        )
    return model.to(dtype)


def make_optimizer(model, dtype):
    if dtype == torch.float32:
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(steps):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        inputs = torch.randint(0, 29, (ROWS, LENGTH), generator=generator)
        targets = torch.randint(0, 29, (ROWS, LENGTH), generator=generator)
        targets[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = -100
        targets[0] = -100  # a row, and with one row per rank a rank, that counts nothing
        yield inputs, targets


def reference(kind, dtype, steps):
    """Plain torch: (losses, norms, gradients, parameters), the last two by name."""
    model = make_model(kind, dtype)
    opt = make_optimizer(model, dtype)
    for module in model.modules():
        if isinstance(module, par.MoE):
            module.aux_scale = 1 / MICROBATCHES  # the load-balance loss is a mean over the microbatches
    losses, norms = [], []
    for inputs, targets in batches(steps):
        opt.zero_grad()
        total, sizes = (
            (targets != -100).sum(),
            [ROWS // MICROBATCHES + (i < ROWS % MICROBATCHES) for i in range(MICROBATCHES)],
        )
        losses.append(0.0)
        for x, y in zip(inputs.split(sizes), targets.split(sizes), strict=True):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / total
            losses[-1] += loss.item()
            loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        opt.step()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return (
        losses,
        norms,
        gradients,
        {name: parameter.detach() for name, parameter in model.named_parameters()},
    )


def run_plan(rank, world_size, kind, dtype, plan, steps):
    model = make_model(kind, dtype)
    model, opt = par.parallelize(model, make_optimizer(model, dtype), plan)
    losses, norms = [], []
    for batch in batches(steps):
        losses.append(
            par.step(model, opt, batch, par.cross_entropy, microbatches=MICROBATCHES, clip=CLIP).item()
        )
        norms.append(par.grad_norm(model).item())
    gradients, parameters = par.full_gradients(model), par.full_state_dict(model)
    return (
        losses,
        norms,
        gradients if rank in (0, world_size - 1) else None,
        parameters if rank in (0, world_size - 1) else None,
    )


def relative(actual, expected):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-300)).item()


_references = {}


def compare(kind, text, dtype, steps=STEPS):
    """Runs one plan and returns its largest Errors over all ranks."""
    plan, run = par.Plan.parse(text), (kind, dtype, steps)
    if run not in _references:
        _references[run] = reference(*run)
    losses, norms, gradients, parameters = _references[run]
    worst = [0.0, 0.0, 0.0, 0.0]
    for result in spawn(plan.world_size, run_plan, kind, dtype, plan, steps):
        found = [max(map(relative, result[0], losses)), max(map(relative, result[1], norms)), 0.0, 0.0]
        for place, expected in ((2, gradients), (3, parameters)):
            if result[place] is not None:
                assert set(expected) <= set(result[place]), set(expected) ^ set(result[place])
                found[place] = max(relative(result[place][name], value) for name, value in expected.items())
        worst = [max(pair) for pair in zip(worst, found, strict=True)]
    return Errors(*worst)


TABLE_HEAD = """# Equality with a single process

Written by `python tests/parallel/equality.py`. The same runs are tests, with the limits 1e-6 (fp32) and 1e-12
(fp64, of which tests take the first 4 steps).

{about}

- gpt: learned positions, fused qkv, 3 heads, 4 blocks, head tied to the embedding, vocabulary 37
- llama: rotary positions, 6 query and 2 key-value heads, SwiGLU, RMSNorm, 3 blocks, vocabulary 29
- moe: llama with 5 experts, 2 per token, and load-balance loss
- sequential: an nn.Sequential of embedding, 3 blocks, norm and Linear

| | model | plan | ranks | \
fp32: loss | norm | gradients | parameters | fp64: loss | norm | gradients | parameters |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def main():
    rows = []
    for title, cases in (("alone", ALONE), ("hybrid", HYBRIDS)):
        for kind, text in cases:
            errors = {dtype: compare(kind, text, dtype) for dtype in LIMITS}
            ok = all(max(errors[dtype]) <= limit for dtype, limit in LIMITS.items())
            values = " | ".join(f"{value:.1e}" for dtype in LIMITS for value in errors[dtype])
            rows.append(f"| {title} | {kind} | `{text}` | {par.Plan.parse(text).world_size} | {values} |")
            print(rows[-1], "" if ok else "  <-- above the limit", flush=True)
    head = TABLE_HEAD.format(about=(__doc__ or "").split("\n\n", 2)[2].strip())
    (ROOT / "docs" / "equality.md").write_text(head + "\n".join([*rows, ""]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
