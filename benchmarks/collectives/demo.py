"""The bandwidth table of `make demo`."""

from pycomm.benchmarks.collectives import columns, command, runner
from pycomm.benchmarks.collectives.cases import parse_sizes
from pycomm.benchmarks.common import report
from pycomm.benchmarks.common.ranks import RankError

SIZES = "8,512,4K,32K,256K,1M,4M,16M,64M"


def bandwidth_demo(out_png: str, ranks: int = 2, limit: float = 40.0) -> runner.Results:
    """Prints all_reduce through torch.distributed, pycomm beside Gloo, 8 B to 64 MiB, and writes the plot.

    limit: seconds of measuring, which a busy machine reaches: then the table says what was measured in fewer
    rounds or not at all. Raises RankError when a rank fails or a result is wrong.
    """
    options = runner.Options(
        ops=["all_reduce"],
        sizes=parse_sizes(SIZES),
        ranks=ranks,
        backends=("pycomm-torch", "gloo"),
        rounds=3,
        seconds=0.04,
        limit=limit,
    )
    results = runner.run(options, progress=lambda text: None)
    assert results is not None  # no launcher has started this process
    report.draw(command.show(results, options), columns.draw, out_png)
    if wrong := sum(row.wrong for row in results.rows):
        raise RankError(f"all_reduce: {wrong} elements are wrong.")
    return results
