"""First values of a model that was built on meta, module by module, without ever having the model.

    'layers.3.mlp.up'  seed = hash(rank 0's seed, its name)     nn.Linear(...) of NaN, the rest on meta
        1  reset_parameters() or _reset_parameters()            of the module, then of those around it
        2  _init_weights(module)                                of the nearest one that has it (transformers,
                                                                nanoGPT), for the module and those around it
        3  reset_lora_parameters(...)                           peft: of the layer around an adapter

So a value depends on the seed, the name and the shape of its module, and on nothing else: it is the same
under every plan and on every rank and device. It is not the value of a model that is initialised in one go,
where one stream of random numbers goes through all modules. What a model does in __init__ beyond these
functions is not done again.

The modules around are run on meta, where all that is not asked for costs nothing, since some write into what
lies in them (the projections of GPT-2, nn.Transformer). What is NaN afterwards (whole numbers: what depends
on what was there before) nobody has initialised: it is refused. Buffers that are not saved, such as the
frequencies of rotary embeddings, come from the same functions. Cost: the memory of one module at a time.
"""

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

__all__ = ["Initial"]

RESETS = ("reset_parameters", "_reset_parameters")
INITIALISE = "_init_weights"
RESET_ADAPTER = "reset_lora_parameters"  # of a layer of peft
ADAPTERS = ("lora_A", "lora_embedding_A")  # of a layer of peft, by name of the adapter
KNOWN_ADAPTERS = (True, "gaussian")  # init_lora_weights that need no values of the layer


class Initial:
    """model: before anything is changed. seed: equal on all ranks."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed = seed
        known: dict[int, torch.Tensor] = {
            id(p): nn.Parameter(_on_meta(p), p.requires_grad) for p in model.parameters()
        }
        known |= {id(b): _on_meta(b) for b in model.buffers()}
        try:
            self.model = copy.deepcopy(model, known)
        except Exception as error:
            raise ValueError(
                f"this {type(model).__name__} is on meta and cannot be copied ({type(error).__name__}: "
                f"{error}), which its first values need: give it memory and values first (to_empty)"
            ) from error
        self.order = {path: number for number, (path, _) in enumerate(self.model.named_modules())}
        # (name of a module, its tensors) that was computed last
        self.last: tuple[str | None, dict[str, torch.Tensor]] = None, {}

    def is_adapter(self, name: str) -> bool:
        """Whether a parameter is one that peft has added to a layer."""
        around = [hasattr(module, RESET_ADAPTER) for module in self._around(name)]
        return any(around) and ".base_layer." not in name

    def place(self, name: str) -> int:
        """In which order to read: by module."""
        return self.order.get(name.rpartition(".")[0], 0)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a parameter or a buffer, on the CPU."""
        path, _, key = name.rpartition(".")
        if self.last[0] != path or key not in self.last[1]:
            self.last = None, {}  # its memory first
            self.last = path, self._compute(path, name)
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        return self.last[1][key][box]

    def close(self) -> None:
        self.last = None, {}

    def _around(self, name: str) -> list[nn.Module]:
        """The modules that `name` lies in, inner to outer."""
        parts = name.split(".")[:-1]
        return [self.model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]

    def _compute(self, path: str, name: str) -> dict[str, torch.Tensor]:
        found = self._run(path, name, 0)
        whole = any(not value.is_floating_point() for value in found.values())
        again = self._run(path, name, 1) if whole else found
        written: dict[str, torch.Tensor] = {}
        for key, value in found.items():
            untouched = value.isnan().any() if value.is_floating_point() else not value.equal(again[key])
            if not untouched:
                written[key] = value
            elif key == name.rpartition(".")[2]:
                kind = type(self.model.get_submodule(path)).__name__
                raise ValueError(
                    f"{name!r} is on meta, and nothing computes its value: {kind} has no reset_parameters() "
                    "that writes it, and no _init_weights() around it does. Give the model memory and values "
                    "first (to_empty), write such a function, or have the value in weights="
                )
        return written

    @torch.no_grad()
    def _run(self, path: str, name: str, filling: int) -> dict[str, torch.Tensor]:
        """The module's own parameters and buffers, by key, after its initialisation."""
        chain = self._around(name)
        module = chain[0]
        kept = dict(module._parameters), dict(module._buffers)
        generator = torch.default_generator
        state = generator.get_state()
        try:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = nn.Parameter(_blank(parameter, filling), False)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = _blank(buffer, filling)
            generator.manual_seed(self._seed_of(path))
            with torch.device("cpu"):
                _initialise(chain)
            now = {**module._parameters, **module._buffers}
            return {key: value.detach() for key, value in now.items() if value is not None}
        except Exception as error:
            raise ValueError(
                f"{name!r} is on meta, and its initialisation fails ({type(error).__name__}: {error}). Give "
                "the model memory and values first (to_empty), or have the value in weights="
            ) from error
        finally:
            generator.set_state(state)
            module._parameters.update(kept[0])
            module._buffers.update(kept[1])

    def _seed_of(self, path: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}:{path}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big")


def _initialise(chain: Sequence[nn.Module]) -> None:
    """chain: a module and those around it, inner to outer."""
    for module in chain:
        reset = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
        if reset is not None:
            reset()
    for place, module in enumerate(chain):
        initialise = next(
            (getattr(each, INITIALISE) for each in chain[place:] if hasattr(each, INITIALISE)), None
        )
        if initialise is not None:
            initialise(module)
    for module in chain:
        if hasattr(module, RESET_ADAPTER):
            _reset_adapters(module, getattr(chain[-1], "peft_config", {}))


def _reset_adapters(layer: nn.Module, configs: Mapping[str, object]) -> None:
    for adapter in {name for held in ADAPTERS for name in getattr(layer, held, {})}:
        how = getattr(configs.get(adapter), "init_lora_weights", None)
        if how not in KNOWN_ADAPTERS:
            raise ValueError(f"init_lora_weights={how!r} needs the values of the layer, or is not known here")
        getattr(layer, RESET_ADAPTER)(adapter, how)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _blank(tensor: torch.Tensor, filling: int) -> torch.Tensor:
    """Memory for a tensor on meta. What is left of it tells that nobody has written there."""
    value = math.nan if tensor.is_floating_point() or tensor.is_complex() else filling
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
