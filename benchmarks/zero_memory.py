"""Memory of training under ZeRO, measured beside its closed forms (Rajbhandari et al. 2020, figure 1).

    python -m pycomm.benchmarks.zero_memory [--ranks 1,2,4] [--layers 96] [--dim 128] [--out FILE.png]
                                            [--json FILE.json] [--markdown FILE.md]

P parameters, N ranks, 2-byte values and gradients, fp32 master copies and two fp32 moments (Adam), bytes per
rank:

    zero 0    16 P            zero 1    4 P + 12 P/N         zero 2    2 P + 14 P/N         zero 3    16 P/N

Measured is the largest number of bytes alive at one time in the second step (in the first one Adam makes its
moments), on every rank: all allocations of torch's CPU allocator, from the making of the model on, as torch's
profiler reports them, and the registered buffers, which lie outside that allocator. The model is a chain of
many equal layers run on one row, so that activations and what is in use at one time (buckets on the way,
gathered layers, the gradient of one bucket in fp32) are small beside the rest; how small is what is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pycomm.parallel as par
from pycomm.benchmarks.common import ranks as on_ranks
from pycomm.benchmarks.common import report
from pycomm.benchmarks.common.report import Content, Page, Pyplot, Table
from pycomm.parallel.data.bucket import BufferedBucket
from pycomm.parallel.parts import parts_of
from pycomm.parallel.planning.dry_run import events_of, peak_of
from pycomm.parallel.zero.flat import FlatShards

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pycomm.parallel.ground.plan import Zero
    from pycomm.parallel.parts import Parallelized

__all__ = ["closed_form", "measure"]


ZEROS: tuple[Zero, ...] = (0, 1, 2, 3)


class Trained(NamedTuple):
    """peak: bytes in the second step; parameters: how many."""

    peak: int
    parameters: int


def closed_form(zero: int, ranks: int) -> float:
    """Bytes per parameter and rank."""
    return {0: 16, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[zero]


def _registered(parts: Parallelized) -> int:
    """Bytes of registered buffers, which torch's allocator does not see. In a group of one there are none."""
    held: list[torch.Tensor] = []
    for shards in parts.all_shards:
        if shards.bucket.group.size > 1:
            if isinstance(shards.bucket, BufferedBucket) and shards.bucket.flat is not None:
                held.append(shards.bucket.flat)
            if isinstance(shards, FlatShards):
                held.append(shards.values)
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _train(zero: Zero, layers: int, dim: int) -> Trained:
    """On this rank."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(layers)))
        count = sum(parameter.numel() for parameter in model.parameters())
        bucket_mb = 2.01 * count / layers * 2 / 1e6  # two layers
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        plan = par.Plan(dp=ranks, zero=zero, precision="bf16", bucket_mb=bucket_mb)
        trained, opt = par.parallelize(model, torch.optim.Adam(model.parameters(), lr=1e-3), plan)
        batch = torch.randn(ranks, dim), torch.randn(ranks, dim)
        par.step(trained, opt, batch, nn.functional.mse_loss)
        with torch.profiler.record_function("second step"):
            par.step(trained, opt, batch, nn.functional.mse_loss)
    return Trained(peak_of(events_of(recorded)) + _registered(parts_of(trained)), count)


def _on_rank(_: object, zero: Zero, layers: int, dim: int) -> Trained:
    return _train(zero, layers, dim)


def measure(ranks: int, zero: Zero, layers: int = 96, dim: int = 128) -> tuple[float, float]:
    """(largest measured bytes per parameter over the ranks, closed form)."""
    # one rank trains without torch.distributed
    group: dict[str, Any] = {"backend": "pycomm"} if ranks > 1 else {}
    results = on_ranks.run(ranks, _on_rank, zero, layers, dim, mode="processes", timeout=120.0, **group)
    return max(peak / parameters for peak, parameters in results), closed_form(zero, ranks)


# --- report --------------------


def table(content: Content, title: str | None = None) -> Table:
    lines: list[list[str]] = []
    for row in content["rows"]:
        measured, expected = row["measured"], row["closed_form"]
        cells = [f"{measured:.3f}", f"{expected:.3f}", f"{measured / expected:.3f}"]
        lines.append([str(row["ranks"]), str(row["zero"]), *cells])
    return Table(title, ["ranks", "zero", "measured", "closed form", "ratio"], lines)


def page(content: Content) -> Page:
    size = f"{content['layers']} layers of {content['dim']} x {content['dim']}"
    return Page([f"Peak bytes per parameter and rank in a step, {size}."], [table(content)], [])


def draw(content: Content, pyplot: Pyplot) -> Figure:
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    rows, width = content["rows"], 0.2
    ranks = sorted({row["ranks"] for row in rows})
    for zero in range(4):
        mine = [row for row in rows if row["zero"] == zero]
        places = [ranks.index(row["ranks"]) + (zero - 1.5) * width for row in mine]
        heights = [row["measured"] for row in mine]
        bars = axes.bar(places, heights, width * 0.92, label=f"zero={zero}", color=f"C{zero}")
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        ends = [[place + side * width / 2 for place in places] for side in (-1, 1)]
        axes.hlines([row["closed_form"] for row in mine], *ends, colors="black", linewidth=1.5)
    axes.plot([], [], color="black", label="closed form")
    axes.set_xticks(range(len(ranks)), [f"{n} rank{'s' * (n > 1)}" for n in ranks])
    axes.set_ylabel("peak bytes per parameter and rank")
    axes.set_title("bf16 with fp32 master copies, Adam: measured and 4P+12P/N, 2P+14P/N, 16P/N", fontsize=10)
    axes.legend(ncols=5, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.benchmarks.zero_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (default %(default)s)")
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--out", dest="plot", metavar="FILE", help="picture to write (.png)")
    parser.add_argument("--json", metavar="FILE", help="figures to write")
    parser.add_argument("--markdown", metavar="FILE", help="page to write")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    content: Content = {
        **report.context("zero_memory"),
        "layers": given.layers,
        "dim": given.dim,
    }
    content["rows"] = []
    for ranks in map(int, given.ranks.split(",")):
        for zero in ZEROS:
            measured, expected = measure(ranks, zero, given.layers, given.dim)
            row = {"ranks": ranks, "zero": zero, "measured": measured, "closed_form": expected}
            content["rows"].append(row)
    report.write(content, given, page, draw)
    report.show([table(content, "bytes per parameter and rank, peak of a step")])
    return 0


if __name__ == "__main__":
    main()
