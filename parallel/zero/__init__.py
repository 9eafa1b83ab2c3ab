"""ZeRO: optimizer state, gradients and parameters as shards. Rajbhandari et al. 2020."""
