"""A run of the model aside, as every experiment asks for it. run/aside.py makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from pycomm.parallel.given import Tree
    from pycomm.parallel.models.drawn import Drawn

__all__ = ["Ran", "Runs"]


class Ran(NamedTuple):
    """One run of the model. result: what `take` gave, on ranks with the last stage."""

    result: Any = None
    error: Exception | None = None
    drawn: Drawn = ()  # what had been drawn at its end
    draws: bool = False  # whether it has drawn some
    sends: bool = False  # whether the model's own code has sent something
    loss_draws: bool = False  # whether `take` has
    given: tuple[Tree, ...] = ()  # what each stage of this rank gave
    work: int = 0  # a mark of its operations and their shapes; 0: not watched
    all_know: bool = False  # of the error, all stages


class Runs(Protocol):
    """Runs the model aside (run/aside.py, Aside).

    inputs: few rows. take: called with the output, on ranks with the last stage; what it returns is
    Ran.result. number: 0 for the random numbers that the next pass draws, 1 .. for others. failed: a run
    before raised here. in_eval, graph: all modules in eval mode, with gradients. What the model or `take`
    raises is Ran.error, except a DistError. Collective where forwards are, and over pp.
    """

    def __call__(
        self,
        inputs: Tree,
        take: Callable[[Tree], object],
        number: int,
        failed: bool = False,
        in_eval: bool = False,
        graph: bool = False,
    ) -> Ran: ...
