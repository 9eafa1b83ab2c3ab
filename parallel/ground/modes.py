"""Modes of torch functions, which see every call of torch's Python API while they are active."""

import contextlib

import torch

__all__ = ["without_modes"]


@contextlib.contextmanager
def without_modes():
    """None of them is active inside: they would take other tensors for the hidden state."""
    with contextlib.ExitStack() as stack:
        for _ in torch.overrides._get_current_function_mode_stack():
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        yield
