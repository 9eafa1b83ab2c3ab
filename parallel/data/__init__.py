"""Data parallelism: buckets of gradients, DistributedDataParallel, compression, and the naive baseline.

ddp.py            DistributedDataParallel, with torch's conventions
naive.py          one process does all the work: the baseline
reducer.py        when buckets are summed, in an order that all ranks share
bucket.py         gradients of several parameters in one flat buffer
flat.py           how parameters lie in a flat buffer that is cut into equal chunks
replicated.py     gradients that every rank holds whole
compression.py    compressed sums of a bucket
gather_rows.py    the rows of all data ranks, for contrastive losses
batch_norm.py     BatchNorm over the rows of all data ranks
"""

from pycomm.parallel.data.compression import make_compression
from pycomm.parallel.data.ddp import DistributedDataParallel
from pycomm.parallel.data.gather_rows import gather_rows
from pycomm.parallel.data.naive import NaiveDataParallel

__all__ = ["DistributedDataParallel", "NaiveDataParallel", "gather_rows", "make_compression"]
