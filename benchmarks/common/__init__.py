"""What all benchmarks share.

turns.py     whose turn it is, and figures of samples that were taken in turns
ranks.py     a function on every rank, by pycomm.testing
device.py    CUDA: is it there, which GPU is a rank's, clocks, graphs, copies
oracle.py    what each rank must hold after a collective
data.py      buffers, inputs that are exact in every dtype, the count of wrong elements
report.py    what the figures depend on; tables in a terminal and in Markdown, JSON of one row per line
options.py   parts of the command lines
"""
