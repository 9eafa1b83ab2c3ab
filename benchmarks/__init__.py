"""pycomm.benchmarks: measures collectives of pycomm, Gloo and MPI side by side, with the columns of nccl-tests.

    python -m pycomm.benchmarks all_reduce --sizes 8:256M --dtype f32 --ranks 4 --backends pycomm,gloo,mpi

Files in reading order: metrics.py (what is measured and how it is counted), data.py (inputs and the check of results), memory.py
(buffers), device.py (CUDA), backends.py and nccl_bindings.py (how each backend is called), worker.py (one rank), channel.py and launch.py
(how ranks are started and told what to do), runner.py (whose turn it is), report.py (tables, files, plot), __main__.py (the command
line), demo.py (the table of `make demo`). The folder strategies measures training strategies: `python -m pycomm.benchmarks strategies`. The
folder gpu_check is a program of its own: `make gpu-check`.
"""

__all__ = ["bandwidth_demo"]


def bandwidth_demo(out_png, ranks=2):
    """See demo.bandwidth_demo; imported when called, so that a rank under MPI does not pay for it."""
    from .demo import bandwidth_demo

    return bandwidth_demo(out_png, ranks)
