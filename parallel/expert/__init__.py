"""Expert parallelism: a mixture of experts whose tokens travel to the ranks that hold their experts."""
