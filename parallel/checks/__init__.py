"""What is asked of a model before it is trained, and what is needed to ask.

kept.py     what a model holds, kept from the runs of a check

The checks themselves lie where they were written: rows in run/prove_rows.py, losses in run/prove_loss.py, the
sequence in sequence/proof.py and run/prove_glue.py.
"""
