"""The bandwidth table of `make demo`."""

from . import report, runner
from .metrics import parse_sizes

SIZES = "8,512,4K,32K,256K,1M,4M,16M,64M"


def bandwidth_demo(out_png, ranks=2):
    """Prints all_reduce through torch.distributed, pycomm beside Gloo, 8 B to 64 MiB, and writes the plot. Takes about 30 s.

    Returns what runner.run does (Results). Raises RankError when a rank fails or a result is wrong.
    """
    options = runner.Options(
        ops=["all_reduce"], sizes=parse_sizes(SIZES), ranks=ranks, backends=("pycomm-torch", "gloo"), rounds=3, seconds=0.04
    )
    results = runner.run(options, progress=lambda text: None)
    report.print_tables(results, options)
    report.write_plot(out_png, results)
    wrong = sum(row.wrong for row in results.rows)
    if wrong:
        raise runner.RankError(f"all_reduce: {wrong} elements are wrong.")
    return results
