"""Training strategies beside each other: step time and peak memory of pycomm.parallel and of torch's own,
over pycomm and over Gloo.

    python -m pycomm.benchmarks strategies --plans "dp=2;dp=2,zero=3;tp=2" --markdown FILE --json FILE --plot
    FILE

Files in reading order: model.py (the model, its batches), variants.py (what a variant is; pycomm.parallel),
torch_variants.py, deepspeed_variants.py, memory.py (bytes of live tensors), measure.py (time and memory),
columns.py (pairs, tables, picture), command.py (the command line).
"""
