"""What every rank does, and who waits for whom: docs/trace.md.

    PYCOMM_TRACE=folder torchrun ... train.py      every operation of every group, and the spans of par.step
    with comm.trace("folder"): ...                 the same for a part of a program
    python -m pycomm.trace folder                  what it says: a table, stragglers, overlap, a timeline

A program may add spans of its own:

    from pycomm import trace
    with trace.span("load batch"): ...

Reading order: csrc/trace/record.h (what is in a file), files.py, device_clock.py, clocks.py, joined.py, then
what is asked of it: waits.py, devices.py, stragglers.py, overlap.py, chrome.py, picture.py, page.py.
"""

from pycomm.trace.spans import begin, begin_if_asked, end, folder, name_axis, span

__all__ = ["begin", "begin_if_asked", "end", "folder", "name_axis", "span"]
