"""generate() of Hugging Face's models under a plan: the tokens of one process, on every rank.

transformers' own loop runs on every rank. What its call of the model's forward becomes:

    plan                             the forward in the loop                    keys are kept     prompts
    dp, zero 1 and 2                 as it is: ranks know nothing of others     yes               of its own
    tp                               as it is, collective over tp               yes (own heads)   equal in tp
    zero=3, ep                       as it is; a block is gathered to run       yes               equal
    pp, ring, ulysses, megatron_sp   predict() of all tokens so far             no                equal

Without keys each token costs a forward over all that came before it: right, and slow for long texts.

An encoder, which the loop calls by itself before the first token, is gathered to run under zero=3. Under pp
no rank has all of it, and it runs again with each token: what the loop gets for its output are the numbers of
the rows, which it repeats and reorders as it would the output, and which say what rows the forward is given.

Ranks that work together must make the same tokens. Rank 0's random numbers are everybody's during the loop. A
small sum before each forward says whether the tokens so far are the same everywhere, and whether a rank has
left its loop: then all raise, and nobody waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar, cast

import torch

from pycomm import CommError
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.same_batch import differ, mark_of, powers
from pycomm.parallel.parts import Parallelized, parts_of
from pycomm.parallel.run.passes import forward_pass
from pycomm.parallel.run.predict import run_prediction
from pycomm.parallel.zero.units import Phase

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from pycomm.parallel.given import Tree
    from pycomm.parallel.ground.comm import Group

__all__ = ["generate_together"]

P = ParamSpec("P")
T = TypeVar("T")


def generate_together(model: nn.Module) -> None:
    """Changes generate, where it is transformers', of the model and of the models in it."""
    for module in model.modules():
        if any(kind.__name__ == "GenerationMixin" for kind in type(module).__mro__):
            pretrained = cast("PreTrainedModel", module)
            pretrained.generate = functools.partial(_generate, model, pretrained, pretrained.generate)


def _generate(
    model: nn.Module, module: PreTrainedModel, generate: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Arguments and result as the method's own."""
    parts = dataclasses.replace(parts_of(model), model=module)
    is_cut = parts.stage_model is not None
    everybody = is_cut or parts.units is not None or parts.plan.ep > 1
    group = parts.mesh.world if everybody else parts.mesh.group("tp")
    if not everybody and group.size == 1:
        return generate(*args, **kwargs)
    _check(parts, group, args, kwargs)
    if is_cut:
        kwargs["use_cache"] = False
    loop = _Loop(parts, group)
    with (
        parts.last_words.told(),
        parts.writes.inside("generate"),
        _random_numbers_of_first(group, parts.device),
        parts.passes.forward(),
    ):
        with loop.installed():
            return loop.run(lambda: generate(*args, **kwargs))


def _check(parts: Parallelized, group: Group, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> None:
    """Raises ValueError for what cannot be done under the plan."""
    module, plan = parts.model, parts.plan
    given = (
        kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or module.generation_config
    )
    if group.size > 1 and (kwargs.get("max_time") or getattr(given, "max_time", None)):
        raise ValueError(
            f"generate(max_time=...) under Plan({plan}): each rank has its own clock, and would stop at "
            "another token. Use max_new_tokens"
        )
    if _has_encoder(module) and parts.split is not None:
        raise ValueError(
            f"generate() of {type(module).__name__}, an encoder-decoder, under Plan({plan}): its "
            "sequences have two lengths, of which the plan cuts one. Load par.full_state_dict(model) into a "
            "plain model, and generate with that"
        )
    if parts.stage_model is not None and kwargs.get("assistant_model") is not None:
        raise ValueError(f"generate(assistant_model=...) under Plan({plan}): it needs keys that are kept")


def _has_encoder(module: PreTrainedModel) -> bool:
    return bool(getattr(module.config, "is_encoder_decoder", False))


@contextlib.contextmanager
def _random_numbers_of_first(group: Group, device: torch.device) -> Iterator[None]:
    """torch's random numbers are those of the group's first rank. A rank whose own were others has them again
    afterwards; else they go on as in one process.
    """
    cuda = device.type == "cuda"
    own = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    shared = own.to(device, copy=True)
    comm.broadcast(shared, 0, group)
    shared = shared.cpu()
    put = functools.partial(torch.cuda.set_rng_state, device=device) if cuda else torch.set_rng_state
    put(shared)
    try:
        yield
    finally:
        if not torch.equal(own, shared):
            put(own)


class _Taken(NamedTuple):
    module: nn.Module
    forward: Callable[..., Tree]  # its own
    through: Callable[..., Tree]  # what is called instead


class _Loop:
    """The loop of one generate()."""

    def __init__(self, parts: Parallelized, group: Group) -> None:
        self.parts, self.group = parts, group
        self.inside = False  # of a forward
        self.encoded: dict[str, torch.Tensor] = {}  # what the encoder was called with; under pp
        model: PreTrainedModel = parts.model
        self.taken = [_Taken(model, model.forward, self._step)]  # modules whose forwards come here
        if _has_encoder(model) and (parts.stage_model is not None or parts.units is not None):
            encoder = model.get_encoder()
            self.taken.append(_Taken(encoder, encoder.forward, self._encode))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Forwards are called through this loop."""
        before = [module.__dict__.get("forward") for module, _, _ in self.taken]
        for module, _, through in self.taken:
            module.__dict__["forward"] = _like(type(module).forward, through)
        try:
            yield
        finally:
            for (module, _, _), own in zip(self.taken, before, strict=True):
                module.__dict__.pop("forward")
                if own is not None:
                    module.__dict__["forward"] = own

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        ours = [module.__dict__["forward"] for module, _, _ in self.taken]
        for module, forward, _ in self.taken:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for (module, _, _), forward in zip(self.taken, ours, strict=True):
                module.__dict__["forward"] = forward

    def run(self, generate: Callable[[], T]) -> T:
        """Tells the others when this rank has left its loop, by an error too."""
        try:
            out = generate()
        except Exception as error:
            if not self.inside and not isinstance(error, CommError):
                self._agree((), left=True)
            raise
        self._agree((), left=True)
        return out

    def _step(self, *args: Tree, **kwargs: Tree) -> Tree:
        self.inside = True  # and stays so where this raises: the others may be in it
        self._agree((args, *(kwargs.get(name) for name in _OF_TOKENS)))
        if self.parts.stage_model is not None:
            out = self._predicted(args, kwargs)
        else:
            out = self._gathered(0, args, kwargs)
        self.inside = False
        return out

    def _encode(self, *args: Tree, **kwargs: Tree) -> Tree:
        self.inside = True
        self._agree((args, *(kwargs.get(name) for name in _OF_TOKENS)))
        if self.parts.stage_model is None:
            out = self._gathered(1, args, kwargs)
        else:
            out = self._numbered(args, kwargs)
        self.inside = False
        return out

    def _gathered(self, which: int, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
        """The forward of a module among `taken`, on this rank."""
        forward = self.taken[which].forward
        if self.parts.units is None:
            return forward(*args, **kwargs)
        with self._as_it_was(), forward_pass(self.parts, Phase.EVALUATE, -which, 0):
            return forward(*args, **kwargs)

    def _numbered(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> ModelOutput:
        """In the place of the encoder's output: (rows, 1, 1), the number of each row."""
        inputs = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        name = getattr(self.parts.model, "main_input_name", "input_ids")
        main = inputs.get(name, inputs.get("inputs_embeds"))
        if args or main is None:
            raise ValueError(
                f"generate() under Plan({self.parts.plan}): the encoder is called without {name}= and "
                "inputs_embeds="
            )
        self.encoded, rows = inputs, len(main)
        numbers = torch.arange(rows, dtype=torch.float64, device=self.parts.device)
        output = sys.modules["transformers.modeling_outputs"].BaseModelOutput
        return output(last_hidden_state=numbers[:, None, None])

    def _predicted(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> ModelOutput:
        if args or kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError(
                f"generate() under Plan({self.parts.plan}) has the logits alone: no attentions, no hidden "
                "states"
            )
        kept = {name: value for name, value in kwargs.items() if name not in _OF_KEYS and value is not None}
        output = sys.modules["transformers.modeling_outputs"]
        numbers = kept.pop("encoder_outputs", None)
        if numbers is not None:
            if not self.encoded:
                raise ValueError(
                    f"generate(encoder_outputs=...) under Plan({self.parts.plan}): give it what the encoder "
                    "is called with"
                )
            rows = numbers[0][:, 0, 0].long()
            kept = {name: value for name, value in kept.items() if name not in self.encoded}
            # A mask that the encoder does not look at may have rows of its own (Whisper).
            inputs = {name: value for name, value in self.encoded.items() if len(value) > int(rows.max())}
            kept |= {name: value[rows] for name, value in inputs.items()}
        kind = output.CausalLMOutputWithPast if numbers is None else output.Seq2SeqLMOutput
        length = next(kept[name] for name in _OF_TOKENS if name in kept).shape[1]
        if self.parts.split is not None:
            kept.pop("logits_to_keep", None)  # the last position is on some rank only
            kept = _longer(kept, length, 2 * self.parts.split.degree)
        with self._as_it_was():
            logits = run_prediction(self.parts, {**kept, "use_cache": False, "return_dict": True})
        return kind(logits=logits[:, :length])

    def _agree(self, tokens: Tree, left: bool = False) -> None:
        """Raises ValueError, on every rank, where tokens differ or some ranks have left."""
        if self.group.size == 1:
            return
        lost = self.parts.writes.problem
        own = [*powers(mark_of(tokens)), float(left), float(lost is not None)]
        numbers = torch.tensor(own, dtype=torch.float64, device=self.parts.device)
        comm.all_reduce(numbers, self.group)
        total, squares, gone, losing = numbers.tolist()
        self.inside = self.inside or gone not in (0, self.group.size)
        who, size = f"[rank {self.group.rank} of {self.group.name}] generate:", self.group.size
        if losing:
            raise ValueError(f"{who} {lost or 'another rank would lose a write to a parameter: see there'}")
        if gone not in (0, size):
            raise ValueError(
                f"{who} {int(gone)} of {size} ranks have ended, the others not: prompts, arguments or a "
                "stopping criterion differ. Ranks that share a forward need the same ones"
            )
        if differ(total, squares, size):
            raise ValueError(
                f"{who} ranks have different prompts or have made different tokens. Give all of them the "
                "same prompts and arguments, and call model.eval() before"
            )


def _longer(inputs: dict[str, Tree], length: int, least: int) -> dict[str, Tree]:
    """Inputs of at least so many positions, so that every rank has two: of one query alone, transformers
    takes it that it sees all keys. What comes behind changes nothing that is before it in a decoder.
    """
    missing = least - length
    if missing <= 0:
        return inputs
    found = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length:
            last = value[:, -1:].expand(-1, missing, *value.shape[2:])
            if name == "position_ids":
                last = last + torch.arange(1, missing + 1, device=value.device)
            found[name] = torch.cat([value, last], 1)
    return found


def _like(forward: Callable[P, T], through: Callable[P, T]) -> Callable[P, T]:
    """`through` with the signature of `forward`, at which generate() looks."""

    @functools.wraps(forward)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return through(*args, **kwargs)

    return called


# Whose positions the logits have, the first that there is.
_OF_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
_OF_KEYS = ("past_key_values", "cache_position", "use_cache", "return_dict")
