"""generate() of Hugging Face's decoders under a plan: the tokens of one process, on every rank.

transformers' own loop runs on every rank. What its call of the model's forward becomes:

    plan                             the forward in the loop                    keys are kept     prompts
    dp, zero 1 and 2                 as it is: ranks know nothing of others     yes               of its own
    tp                               as it is, collective over tp               yes (own heads)   equal in tp
    zero=3, ep                       as it is; a block is gathered to run       yes               equal
    pp, ring, ulysses, megatron_sp   predict() of all tokens so far             no                equal

Without keys each token costs a forward over all that came before it: right, and slow for long texts.

Ranks that work together must make the same tokens. Rank 0's random numbers are everybody's during the loop. A
small sum before each forward says whether the tokens so far are the same everywhere, and whether a rank has
left its loop: then all raise, and nobody waits.
"""

import contextlib
import dataclasses
import functools
import sys

import torch

from pycomm import CommError
from pycomm.parallel.ground import comm
from pycomm.parallel.ground.same_batch import differ, mark_of, powers
from pycomm.parallel.parts import parts_of
from pycomm.parallel.run.passes import forward_pass
from pycomm.parallel.run.predict import run_prediction
from pycomm.parallel.zero.units import Phase

__all__ = ["generate_together"]


def generate_together(model):
    """Changes generate, where it is transformers', of the model and of the models in it."""
    for module in model.modules():
        if any(kind.__name__ == "GenerationMixin" for kind in type(module).__mro__):
            module.generate = functools.partial(_generate, model, module, module.generate)


def _generate(model, module, generate, *args, **kwargs):
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
    loop = _Loop(parts, group, module.forward)
    with parts.last_words.told(), _random_numbers_of_first(group, parts.device):
        with loop.installed():
            return loop.run(lambda: generate(*args, **kwargs))


def _check(parts, group, args, kwargs):
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
    if getattr(module.config, "is_encoder_decoder", False) and (parts.stage_model or parts.units):
        raise ValueError(
            f"generate() of {type(module).__name__}, an encoder-decoder, under Plan({plan}): its "
            "encoder is called by itself, where the plan has not all of it. Load par.full_state_dict(model) "
            "into a plain model, and generate with that"
        )
    if parts.stage_model is not None and kwargs.get("assistant_model") is not None:
        raise ValueError(f"generate(assistant_model=...) under Plan({plan}): it needs keys that are kept")


@contextlib.contextmanager
def _random_numbers_of_first(group, device):
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


class _Loop:
    """The loop of one generate(). forward: the module's own."""

    def __init__(self, parts, group, forward):
        self.parts, self.group, self.forward = parts, group, forward
        self.inside = False  # of a forward

    @contextlib.contextmanager
    def installed(self):
        """The module's forward is called through this loop."""
        state = self.parts.model.__dict__
        before = state.get("forward")

        @functools.wraps(self.forward)  # generate() looks at its signature
        def forward(*args, **kwargs):
            return self._step(*args, **kwargs)

        state["forward"] = forward
        try:
            yield
        finally:
            state.pop("forward")
            if before is not None:
                state["forward"] = before

    @contextlib.contextmanager
    def _as_it_was(self):
        state = self.parts.model.__dict__
        ours, state["forward"] = state["forward"], self.forward
        try:
            yield
        finally:
            state["forward"] = ours

    def run(self, generate):
        """Tells the others when this rank has left its loop, by an error too."""
        try:
            out = generate()
        except Exception as error:
            if not self.inside and not isinstance(error, CommError):
                self._agree((), left=True)
            raise
        self._agree((), left=True)
        return out

    def _step(self, *args, **kwargs):
        self.inside = True  # and stays so where this raises: the others may be in it
        self._agree((args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")))
        parts = self.parts
        if parts.stage_model is not None:
            out = self._predicted(args, kwargs)
        elif parts.units is not None:
            with self._as_it_was(), forward_pass(parts, Phase.EVALUATE, 0, 0):
                out = self.forward(*args, **kwargs)
        else:
            out = self.forward(*args, **kwargs)
        self.inside = False
        return out

    def _predicted(self, args, kwargs):
        if args or kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError(
                f"generate() under Plan({self.parts.plan}) has the logits alone: no attentions, no hidden "
                "states"
            )
        kept = {name: value for name, value in kwargs.items() if name not in _OF_KEYS and value is not None}
        tokens = kept["input_ids"] if "input_ids" in kept else kept["inputs_embeds"]
        length = tokens.shape[1]
        if self.parts.split is not None:
            kept.pop("logits_to_keep", None)  # the last position is on some rank only
            kept = _longer(kept, length, 2 * self.parts.split.degree)
        with self._as_it_was():
            logits = run_prediction(self.parts, {**kept, "use_cache": False, "return_dict": True})
        logits = logits[:, :length]
        output = sys.modules["transformers.modeling_outputs"].CausalLMOutputWithPast
        return output(logits=logits)

    def _agree(self, tokens, left=False):
        """Raises ValueError, on every rank, where tokens differ or some ranks have left."""
        if self.group.size == 1:
            return
        numbers = [*powers(mark_of(tokens)), float(left)]
        numbers = torch.tensor(numbers, dtype=torch.float64, device=self.parts.device)
        comm.all_reduce(numbers, self.group)
        total, squares, gone = numbers.tolist()
        self.inside = self.inside or gone not in (0, self.group.size)
        who, size = f"[rank {self.group.rank} of {self.group.name}] generate:", self.group.size
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


def _longer(inputs, length, least):
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


_OF_KEYS = ("past_key_values", "cache_position", "use_cache", "return_dict")
