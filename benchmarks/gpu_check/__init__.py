"""The check of everything that needs a GPU, in one command: `make gpu-check`, or python -m benchmarks.gpu_check from the repository's root.

__main__.py   the command line
steps.py      the steps with their limits of time: build, versions, checks, benchmarks; each is a process of its own
one.py        one check in such a process; pytest runs the same (tests/gpu)
checks.py     the table of checks by name
ranks.py      ranks on a GPU as threads or processes; what a check records
cases.py, values.py              every collective, algorithm, dtype and reduction against a one-line oracle
behaviour.py, order.py           registered buffers, messages, groups, other arrays; streams and graphs
faults.py, torch_checks.py       errors and dead ranks; torch.distributed
fused_cases.py, fused.py, fused_order.py    pycomm.fused: values, gradients; graphs, streams, lost peers, the tuner
summary.py    the report: pass or fail of each check, tables, medians, targets
"""
