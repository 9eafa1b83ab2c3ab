"""Collectives of pycomm, Gloo, MPI and NCCL beside each other, with the columns of nccl-tests.

Files in reading order: cases.py (what is measured), bounds.py (what limits ranks that share a GPU), spec.py
(a rank's settings), backends.py, mpi.py, nccl.py (how each backend is called), worker.py (one rank),
channel.py, launch.py (how ranks are started and told what to do), runner.py (whose turn it is, how it is
counted), columns.py (tables, picture), command.py (the command line), demo.py (the table of `make demo`).
"""
