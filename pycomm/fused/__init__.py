"""pycomm.fused: matrix products whose input is gathered, or whose output is reduced over ranks, while they
run.

    y = fused.all_gather_matmul(x, weight.t(), group)
        x: this rank's rows; y: all rows, this rank's columns
    z = fused.matmul_reduce_scatter(y, weight2.t(), group)
        y: this rank's part of the inner dimension; z: this rank's rows of the sum

On CUDA the product and the movement are one Triton kernel over memory that the ranks share, where a table
says that this is faster. Else, and on the CPU, they are a product and a collective, in parts that overlap
where that helps. pycomm.explain says which and why; PYCOMM_FUSED forces it. Bias and activation come after
the reduction. All functions have gradients. In one form a result has the same bits in every run and, where
all ranks get it, on all ranks.

    api.py        the functions, gradients; arguments.py, problem.py (one call as numbers)
    twice.py      gradients that are differentiated again
    dispatch.py   chooses the form that runs: choice.py (a table), tuner.py (what was measured), machine.py
    form.py       runs one form: plain.py, ranks.py (product plus collective) or
    kernels/      the Triton kernels: launch.py launches them, context.py has the memory, config.py the tiles
"""

from pycomm.fused.api import all_gather_matmul, matmul, matmul_all_reduce, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "matmul", "matmul_all_reduce", "matmul_reduce_scatter"]
