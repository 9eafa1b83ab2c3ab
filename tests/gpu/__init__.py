"""The check of everything that needs a GPU, in one command: `make gpu-check`, or python tests/gpu.

It takes the packages of the Python that runs it and builds the extension into the source tree first; so
nothing here is installed, and what it reads before the build does not need the extension.

program.py    the command line
steps.py      the steps with their limits of time: build, versions, checks, benchmarks; each is a process
one.py        one check in such a process; pytest runs the same (test_checks.py)
checks.py     the table of checks by name
ranks.py      ranks on a GPU as threads or processes; what a check records
cases.py, values.py              every collective, algorithm, dtype and reduction against tests/oracle.py
behaviour.py, order.py           registered buffers, messages, groups, other arrays; streams and graphs
faults.py, torch_checks.py       errors and dead ranks; torch.distributed
fused_cases.py, fused_values.py, fused_order.py    pycomm.fused: values, gradients; graphs, streams, tuner
summary.py    the report: pass or fail of each check, tables, medians, targets

test_gpu_check.py and test_gpu_check_fused.py test all this without a GPU, on host tensors.
"""
