"""Data parallelism: buckets of gradients, DistributedDataParallel, compression, and the naive baseline."""

from pycomm.parallel.data.compression import make_compression
from pycomm.parallel.data.ddp import DistributedDataParallel
from pycomm.parallel.data.naive import NaiveDataParallel

__all__ = ["DistributedDataParallel", "NaiveDataParallel", "make_compression"]
