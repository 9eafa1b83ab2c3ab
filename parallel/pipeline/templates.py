"""What an absent module returns, found without its values: its forward is run on the meta device, once for
each shape of the arguments, on a copy that has no data and that nothing wraps.

Some code cannot run there: a mixture of experts looks up which tokens go where (nonzero), and a tensor on
meta has no values. Of such a module inside of a block one thing is taken for granted, that it returns one
tensor like the first that it was given, in shape and dtype:

    block 0                        on meta                      where block 0 is
      attention                    run
      experts   nonzero fails      like its first argument      run; what it returns must be like that, or it
      residual                     run                          raises a ValueError

The stage that has the block makes the same trial, so it knows what others take for granted, and looks at the
real result before it is handed on. So what a stage waits for is what comes, or there is an error.

A result may leave a module by other ways. Into a list or dict that it was given: that is refused. On the
module itself (`self.aux_loss = ...`): other stages are told which attributes hold it, `left`, numbers too.
Into a global or an attribute of a class (models/shared_state.py): refused where a run changes it that follows
one of the same shapes, as what is kept for the next call (tables of positions) is there by then. A number
among the results must be the same in both runs.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pycomm.parallel.given import Tree
from pycomm.parallel.ground.leaves import leaves
from pycomm.parallel.models.caches import Caches
from pycomm.parallel.models.modes import copied, eager, without_modes
from pycomm.parallel.models.norms import batch_norms
from pycomm.parallel.models.shared_state import SharedState
from pycomm.parallel.models.trunk import hidden_of

__all__ = ["NOT_HANDED_ON", "Templates", "check_like", "numbers_of"]

NOT_HANDED_ON = (
    "which later pipeline stages would not get: stages hand on the hidden state alone. Compute it behind the "
    "blocks, or use a plan with pp=1"
)

Key: TypeAlias = int | str  # of a block: its index; of another module: its name
Place: TypeAlias = tuple[str, str]  # name of a module in the one of the key, attribute
Shapes: TypeAlias = tuple[tuple[torch.Size, torch.dtype] | str, ...]  # of arguments


class Templates:
    """Keys: of modules that some stage of this rank passes over, or whose result a later stage waits for.

    shared: what blocks write to other objects than themselves.
    """

    def __init__(self, shared: SharedState) -> None:
        self.caches = Caches()
        self.shared = shared
        self.copies: dict[Key, nn.Module] = {}  # without data
        self.guessed: dict[Key, list[str]] = {}  # modules that were taken to return what is like their input
        self.found: dict[tuple[Key, Shapes], Tree] = {}  # result for arguments, on meta
        self.left: dict[Key, dict[Place, Tree]] = {}  # what a forward leaves there

    def keep(self, key: Key, module: nn.Module, guess: bool = False) -> None:
        """Makes the copy. guess: whether something may be taken for granted in it."""
        module = self.copies[key] = _for_shapes(module)
        self.guessed[key] = []
        for name, part in module.named_modules() if guess else ():
            part.forward = functools.partial(_or_guess, self.guessed[key], name, part.forward)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.copies.values() for parameter in module.parameters()]

    def of(self, key: Key, origin: str, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
        """The result for arguments of these shapes, on meta. Raises ValueError where it cannot be found."""
        shapes = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in leaves((args, kwargs))
        )
        if (key, shapes) not in self.found:
            given, spec = tree_flatten((args, kwargs))
            meta = [_empty(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
            meta_args, meta_kwargs = tree_unflatten(meta, spec)
            modules = {name for name, _ in self.copies[key].named_modules()}
            before = {place: leaves(value) for place, value in _attributes(self.copies[key]).items()}
            with torch.no_grad(), without_modes(), eager(), self.shared.kept(on_meta=True):
                try:
                    with torch.device("meta"):  # tensors that the module makes itself
                        out = self._run(key, meta_args, meta_kwargs)
                        problem = self._run_again(key, out, *tree_unflatten(meta, spec))
                except Exception as error:
                    raise ValueError(
                        f"{origin} cannot be run for the shape of its output alone, which a later stage "
                        "needs: its code uses values, or tensors that it was not given "
                        f"({type(error).__name__}: {error}). Use a plan with pp=1"
                    ) from error
            made = [name for name, _ in self.copies[key].named_modules() if name not in modules]
            if made:
                problem = (
                    f"makes its module {made[0]!r} in its forward, which stages without the block would not "
                    "have. Make it in __init__, or run one forward before the optimizer and parallelize"
                )
            if problem is not None:
                raise ValueError(f"{origin} {problem}")
            after, after_spec = tree_flatten((meta_args, meta_kwargs))
            if after_spec != spec or any(a is not b for a, b in zip(after, meta, strict=True)):
                raise ValueError(
                    f"{origin} changes a list or dict that it is given, which later pipeline stages would "
                    "not get: stages hand on the hidden state alone. Use a plan with pp=1"
                )
            self._note_left(key, before)
            self.found[key, shapes] = out
        return self.found[key, shapes]

    def _run(self, key: Key, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
        return self.caches.around(lambda: self.copies[key].forward(*args, **kwargs))

    def _run_again(self, key: Key, out: Tree, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> str | None:
        """What a second run shows that later stages would not get, in words, or None."""
        numbers = numbers_of(out)
        if not numbers and not self.shared.places:
            return None
        before = self.shared.tokens()
        again = numbers_of(self._run(key, args, kwargs))
        changed = self.shared.changed(before)
        if changed is not None:
            return f"writes to {changed}, {NOT_HANDED_ON}"
        return None if again == numbers else f"returns a number ({numbers}, then {again}), {NOT_HANDED_ON}"

    def _note_left(self, key: Key, before: Mapping[Place, list[Tree]]) -> None:
        left = self.left.setdefault(key, {})
        guessed = self.guessed[key]
        for place, value in _attributes(self.copies[key]).items():
            now, old = leaves(value), before.get(place, [])
            same = len(now) == len(old) and all(a is b for a, b in zip(now, old, strict=True))
            unseen = any(_lies_in(place[0], name) for name in guessed)  # its forward did not run to its end
            if (unseen or not same) and any(isinstance(leaf, (torch.Tensor, *NUMBER)) for leaf in now):
                left[place] = tree_map_only(NUMBER, _number, value)


NUMBER = (int, float)  # truth values too


def numbers_of(values: Tree) -> list[float]:
    """The numbers among values of any kind."""
    return [leaf for leaf in leaves(values) if isinstance(leaf, NUMBER)]


def _number(value: float) -> torch.Tensor:
    """In the place of a number that another stage has: refused where it is used."""
    return torch.empty((), dtype=torch.tensor(value).dtype, device="meta")


def _attributes(module: nn.Module) -> dict[Place, Tree]:
    """{(name of a module in it, key): value}, but for parameters, buffers and modules."""
    return {
        (name, key): value
        for name, part in module.named_modules()
        for key, value in part.__dict__.items()
        if key not in ("_parameters", "_buffers", "_modules")
    }


def _lies_in(name: str, above: str) -> bool:
    return not above or name == above or name.startswith(above + ".")


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _for_shapes(module: nn.Module) -> nn.Module:
    """A copy without data. Of what a BatchNorm does in training, some needs values."""
    module = copied(module).to("meta")
    for part in batch_norms(module).values():
        part.eval()
    return module


def _or_guess(
    guessed: list[str], name: str, forward: Callable[..., Tree], *args: Tree, **kwargs: Tree
) -> Tree:
    """The forward of a module on meta; where it asks for values, or cannot go on with what was guessed of its
    parts, a guess.
    """
    before = len(guessed)
    try:
        return forward(*args, **kwargs)
    except Exception as error:
        if len(guessed) == before and not _asks_for_values(error):
            raise
        try:
            out = _empty(hidden_of(args, kwargs))
        except ValueError:
            raise error from None
        guessed[before:] = [name]
        return out


def _asks_for_values(error: Exception) -> bool:
    """What torch raises on meta for operations that have no shape without values, and for a product of
    experts (grouped_mm), which takes other dtypes than bf16 on a device and not on meta.
    """
    known = "cannot be called on meta tensors", "Expected inputs of BF16 type"
    return isinstance(error, NotImplementedError) or any(text in str(error) for text in known)


def check_like(what: str, args: Sequence[Tree], kwargs: Mapping[str, Tree], out: Tree) -> None:
    """Raises ValueError unless `out` is what was taken for granted."""
    given = hidden_of(args, kwargs)
    if isinstance(out, torch.Tensor) and (out.shape, out.dtype) == (given.shape, given.dtype):
        return
    got = f"{tuple(out.shape)}, {out.dtype}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
    raise ValueError(
        f"{what} depends on values, so that later pipeline stages cannot find the shape of what it returns "
        f"and take it to be that of its input, {tuple(given.shape)}, {given.dtype}; it is {got}. Put it into "
        "a module that returns one tensor like its first argument, or use a plan with pp=1"
    )
