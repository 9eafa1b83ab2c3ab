"""python -m pycomm.trace folder: what the ranks did, and who waited for whom. See docs/trace.md."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pycomm.trace import chrome, devices, overlap, picture, stragglers, waits
from pycomm.trace.joined import Trace, load


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        trace = load(options.folder)
    except (OSError, ValueError) as error:
        print(f"pycomm.trace: {error}", file=sys.stderr)
        return 1
    except MemoryError:
        print(f"pycomm.trace: {options.folder} has more than fits into memory", file=sys.stderr)
        return 1
    report(trace)
    try:
        return write(trace, Path(options.out or options.folder), options.html)
    except OSError as error:
        print(f"pycomm.trace: {error}", file=sys.stderr)
        return 1


def write(trace: Trace, out: Path, html: bool) -> int:
    out.mkdir(parents=True, exist_ok=True)
    chrome.write(trace, out / "trace.json")
    written = [out / "trace.json"]
    try:
        picture.draw(trace, out / "step.png")
        written.append(out / "step.png")
    except ImportError:
        print("No picture: matplotlib is not installed (pip install matplotlib).")
    if html:
        from pycomm.trace import page

        try:
            page.write(trace, out / "trace.html")
            written.append(out / "trace.html")
        except ImportError:
            print("No page: plotly is not installed (pip install plotly).", file=sys.stderr)
            return 1
    print("Written: " + ", ".join(map(str, written)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pycomm.trace", description=__doc__)
    parser.add_argument("folder", help="that PYCOMM_TRACE or comm.trace() named")
    parser.add_argument("--out", help="folder for what is written; default: the same")
    parser.add_argument("--html", action="store_true", help="also one page that needs no network (plotly)")
    return parser


def report(trace: Trace) -> None:
    """Prints it. Names of groups, spans and hosts may have what a terminal takes for a command."""
    text = "\n".join(_lines(trace))
    print("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


def _lines(trace: Trace) -> Iterator[str]:
    yield f"{len(trace.rows)} ranks, {trace.duration / 1e9:.3f} s"
    for note in trace.notes:
        yield f"Note: {note}"
    yield "\nWaiting for the last rank against moving, mean of the ranks:\n"
    yield waits.show(waits.table(trace))
    if trace.device_error_ns is not None:
        yield f"\n{devices.MEANING}\n"
        yield waits.aligned(devices.cells(trace))
    yield "\nStragglers:"
    found = stragglers.find(trace)
    for straggler in found:
        yield f"  {stragglers.sentence(straggler)}"
    if not found:
        yield f"  no rank cost the others {100 * stragglers.LEAST_SHARE:.0f}% of the time or more."
    yield "\nOverlap of communication and computation:"
    for row in trace.rows:
        beside = overlap.of_row(row)
        share = "no communication" if beside.percent is None else f"{beside.percent:.0f}%"
        yield f"  rank {row.rank}: {share} of {beside.communication_ms:.3f} ms"


if __name__ == "__main__":
    sys.exit(main())
