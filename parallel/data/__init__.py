"""Data parallelism: buckets of gradients, DistributedDataParallel, compression, and the naive baseline."""
