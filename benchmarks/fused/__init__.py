"""pycomm.fused beside what is written without it: product and collective one after the other, and torch's own
fused operations.

    python -m pycomm.benchmarks fused --op all_gather_matmul --shapes 1024x1024x1024 --dtype f32,bf16
    --markdown FILE --json FILE

Files in reading order: cases.py (shapes, tensors), peers.py (ranks and their groups, native or torch's),
variants.py (what is compared, the exact result), measure.py (whose turn it is, on one rank), columns.py
(rows, tables, picture), command.py.
"""
