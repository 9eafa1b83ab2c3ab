"""Weights in the layout of the Hugging Face hub, of which a rank reads the boxes that it holds.

    folder    model.safetensors                          all tensors in one file, or
              model.safetensors.index.json               key -> file
              model-00001-of-00003.safetensors ...       the files

Names of the model become keys in one way for all of them, the one that finds the most:

    as they are                                          any model
    as the model of transformers inside names them       LoRA: 'base_model.model.' and '.base_layer.' go
    the same without, or with, its base_model_prefix     files of LlamaModel for LlamaForCausalLM, and back

Nothing else is renamed, joined or split; what does not fit is refused before anything is read. A tied
parameter may be in the files under any of its names. If it is there under several, they must be equal.

Values are cast to the dtype that the model was built in, as from_pretrained(dtype=...) casts them. Cost: each
box is read once, from a mapping of its file; one file is open at a time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping, Sequence

    from safetensors import safe_open
    from torch import nn

__all__ = ["HubFiles"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64},
}
# Buffers that older files have and models no longer save, where the model has such a buffer.
FORMER = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq$", "position_ids": r"(^|\.)position_ids$"}


class Entry(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


class HubFiles:
    """The files of a folder, for a model on which nothing was changed yet.

    first_name: {every name of a parameter: the first name of the same one}. spared: function of a name, true
    where it may be missing, as may what its class of transformers says it computes. Raises ValueError for a
    folder that is none or cannot be read, and for files that are not this model's.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        first_name: Mapping[str, str],
        spared: Callable[[str], bool],
    ) -> None:
        self.folder = Path(folder)
        self.entries = _entries(self.folder)
        self._open: safe_open | None = None
        self._file: Path | None = None
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= _persistent_buffers(model)
        path, inner = _of_transformers(model)
        to_key = _way_to_name(path, inner, tensors, self.entries)
        self.keys: dict[str, list[str]] = {}  # first name of a tensor -> its keys in the files
        for name in tensors:
            if to_key(name) in self.entries:
                self.keys.setdefault(first_name.get(name, name), []).append(to_key(name))
        names = dict.fromkeys(first_name.get(name, name) for name in tensors)
        made = _patterns(inner, "_keys_to_ignore_on_load_missing")
        missing = [
            name
            for name in names
            if name not in self.keys and not spared(name) and not _matches(made, to_key(name))
        ]
        unexpected = self._unexpected(model, _patterns(inner, "_keys_to_ignore_on_load_unexpected"))
        if missing or unexpected:
            raise ValueError(self._not_of_this_model(missing, unexpected, to_key))
        for name, keys in self.keys.items():
            for key in keys:
                self._check(name, key, tensors[name])

    def __contains__(self, name: str) -> bool:
        return name in self.keys

    def place(self, name: str) -> str:
        """In which order to read: by file."""
        return str(self.entries[self.keys[name][0]].file)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, as it is in the files: it may be a view of a file, until the next read."""
        first, *others = (self._slice(key, offsets, sizes) for key in self.keys[name])
        if any(not torch.equal(first, other) for other in others):
            raise ValueError(
                f"weights: {' and '.join(map(repr, self.keys[name]))} differ in {self.folder}, and are one "
                "parameter in the model: build it without the tie (tie_word_embeddings=False)"
            )
        return first

    def close(self) -> None:
        self._open = self._file = None

    def _slice(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        file = self.entries[key].file
        if self._open is None or file != self._file:
            self._open, self._file = _opened(file), file
        if not sizes:
            return self._open.get_tensor(key)
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        return self._open.get_slice(key)[box]

    def _unexpected(self, model: nn.Module, ignored: list[str]) -> list[str]:
        known = {key for keys in self.keys.values() for key in keys}
        ignored = ignored + [pattern for ends, pattern in FORMER.items() if _has_buffer(model, ends)]
        return [key for key in self.entries if key not in known and not _matches(ignored, key)]

    def _not_of_this_model(
        self, missing: Sequence[str], unexpected: Sequence[str], to_key: Callable[[str], str]
    ) -> str:
        parts = []
        if missing:
            parts.append(f"{_some([to_key(name) for name in missing])} of the model is not there")
        if unexpected:
            file = self.entries[unexpected[0]].file.name
            parts.append(f"{_some(unexpected)} is there (in {file}), which the model has not")
        more = ""
        if missing and unexpected:
            more = (
                ". Keys that a class of transformers renames or joins when it loads are not known here: give "
                "parallelize the model of from_pretrained"
            )
        return f"weights: the files in {self.folder} are not this model's: {', and '.join(parts)}{more}"

    def _check(self, name: str, key: str, tensor: torch.Tensor) -> None:
        entry = self.entries[key]
        if entry.shape != tuple(tensor.shape):
            raise ValueError(
                f"weights: {key!r} has shape {entry.shape} in {entry.file}, and {name!r} has shape "
                f"{tuple(tensor.shape)} in the model: build it with the sizes of the files"
            )
        saved = DTYPES.get(entry.dtype)
        real = saved is not None and saved.is_floating_point and tensor.dtype.is_floating_point
        if not real and saved != tensor.dtype:
            raise ValueError(
                f"weights: {key!r} is {entry.dtype} in {entry.file}, and {name!r} is {tensor.dtype} in the "
                "model, to which it is not cast: give parallelize the model of from_pretrained"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _opened(file: Path) -> safe_open:
    try:
        from safetensors import safe_open  # of those who ask for it alone
    except ImportError as error:
        raise ValueError("weights: reading safetensors needs the package safetensors") from error
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # of a kind of its own
        raise ValueError(f"weights: {file} cannot be read: {error}") from error


def _entries(folder: Path) -> dict[str, Entry]:
    """{key: Entry} of all files."""
    if not folder.is_dir():
        raise ValueError(f"weights: {folder} is no folder; nothing is downloaded here")
    if (folder / SINGLE).is_file():
        return _entries_of(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise ValueError(f"weights: {folder} has neither {SINGLE} nor {INDEX}")
    try:
        file_of = json.loads((folder / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"weights: {folder / INDEX} cannot be read: {error!r}") from error
    found: dict[str, Entry] = {}
    for name in sorted(set(file_of.values())):
        entries = _entries_of(folder / name)
        lost = [key for key, file in file_of.items() if file == name and key not in entries]
        if lost:
            raise ValueError(f"weights: {folder / name} does not have {_some(lost)}, which {INDEX} promises")
        found |= {key: entry for key, entry in entries.items() if file_of.get(key) == name}
    return found


def _entries_of(file: Path) -> dict[str, Entry]:
    opened = _opened(file)
    found = {}
    for key in opened.keys():  # noqa: SIM118
        part = opened.get_slice(key)
        found[key] = Entry(file, tuple(part.get_shape()), part.get_dtype())
    return found


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{path}.{key}" if path else key: buffer
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def _has_buffer(model: nn.Module, ends: str) -> bool:
    return any(name.endswith(ends) for name, _ in model.named_buffers())


def _of_transformers(model: nn.Module) -> tuple[str, nn.Module | None]:
    """(name, module) of the outermost model of transformers, or ("", None)."""
    for path, module in model.named_modules():
        if isinstance(getattr(type(module), "base_model_prefix", None), str):
            return path, module
    return "", None


def _patterns(inner: nn.Module | None, attribute: str) -> list[str]:
    """What from_pretrained of this class takes no notice of."""
    return list(getattr(inner, attribute, None) or ())


def _matches(patterns: Sequence[str], key: str) -> bool:
    return any(re.search(pattern, key) for pattern in patterns)


def _way_to_name(
    path: str, inner: nn.Module | None, names: Collection[str], entries: Collection[str]
) -> Callable[[str], str]:
    """The function name -> key that finds the most names in the files."""
    prefix: str = getattr(type(inner), "base_model_prefix", "")

    def inside(name: str) -> str:
        return name.removeprefix(f"{path}.").replace(".base_layer.", ".")

    ways: list[Callable[[str], str]] = [lambda name: name, inside]
    if prefix:
        ways.append(lambda name: inside(name).removeprefix(f"{prefix}."))
        ways.append(lambda name: f"{prefix}.{inside(name)}")
    return max(ways, key=lambda way: sum(way(name) in entries for name in names))
