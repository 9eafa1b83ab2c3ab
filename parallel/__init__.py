"""Parallel training strategies, composed by one plan. Import as `pycomm.parallel`."""
