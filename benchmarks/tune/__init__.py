"""Which algorithm is fastest on this machine, by operation, size, ranks and access.

command.py    the command line
measure.py    what every rank runs
choose.py     from times to the rows of the file that pycomm/tuned.py reads
"""
