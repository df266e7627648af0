"""Saving and restoring a run's state: safetensors files, written whole or not at all, checked when read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from caden.errors import CadenError


def flatten(value: Any, path: str) -> dict[str, Tensor]:
    """A nested NamedTuple of tensors as {path: tensor}; None has no entry."""
    if isinstance(value, Tensor):
        return {path: value}
    if value is None:
        return {}
    if isinstance(value, bool | int | float):
        return {path: torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)}
    found: dict[str, Tensor] = {}
    for name, part in zip(value._fields, value):
        found |= flatten(part, f"{path}.{name}")
    return found


def restore(template: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """The structure of `template` with the tensors of a checkpoint."""
    if isinstance(template, Tensor):
        saved = tensors.get(path)
        if saved is None or saved.shape != template.shape or saved.dtype != template.dtype:
            raise CadenError(f"The checkpoint does not fit this run: {path} is missing or of another shape.")
        return saved.to(template.device)
    if template is None:
        return None
    if isinstance(template, bool | int | float):
        return type(template)(restore(torch.empty_like(flatten(template, path)[path]), tensors, path).item())
    return type(template)(*(restore(part, tensors, f"{path}.{n}") for n, part in zip(template._fields, template)))


def _digest(tensors: dict[str, Tensor], numbers: str) -> str:
    total = hashlib.blake2b(numbers.encode(), digest_size=16)
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def save(path: Path, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
    """Write tensors and counters; a reader sees the old file or the new one, never a part."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        shared = any(copy.data_ptr() == other.data_ptr() for other in plain.values() if other.numel())
        plain[name] = copy.clone() if shared else copy  # the format wants every tensor to own its memory
    text = json.dumps(numbers)
    scratch = path.with_suffix(".tmp")
    # One entry: the order of several in the file would be arbitrary, and equal runs must end in equal bytes.
    save_file(plain, scratch, metadata={"caden": json.dumps({"numbers": text, "digest": _digest(plain, text)})})
    os.replace(scratch, path)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Read what `save` wrote, or say in one line that the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["caden"])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if _digest(tensors, metadata["numbers"]) != metadata["digest"]:
            raise KeyError("digest")
        return tensors, json.loads(metadata["numbers"])
    except (SafetensorError, KeyError, OSError, ValueError) as error:
        raise CadenError(
            f"The checkpoint {path} is damaged ({error}); delete it to start that run again from round 0."
        ) from None
