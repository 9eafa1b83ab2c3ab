"""Data parallelism: buckets of gradients, DistributedDataParallel, compression, and the naive baseline."""

from pycomm.parallel.data.compression import make_compression
from pycomm.parallel.data.ddp import DistributedDataParallel
from pycomm.parallel.data.gather_rows import gather_rows
from pycomm.parallel.data.naive import NaiveDataParallel

__all__ = ["DistributedDataParallel", "NaiveDataParallel", "gather_rows", "make_compression"]
