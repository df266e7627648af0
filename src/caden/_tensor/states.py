"""Conversion of states, which are nested NamedTuples of tensors, to flat dictionaries and back."""

from typing import Any

import torch
from torch import Tensor

from caden.errors import CadenError


def flatten(value: Any, path: str) -> dict[str, Tensor]:
    """Flatten a nested NamedTuple of tensors to {path: tensor}; None has no entry."""
    if isinstance(value, Tensor):
        return {path: value}
    if value is None:
        return {}
    if isinstance(value, bool | int | float):
        return {path: torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)}
    tensors: dict[str, Tensor] = {}
    for name, part in zip(value._fields, value):
        tensors |= flatten(part, f"{path}.{name}")
    return tensors


def restore(template: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Fill the structure of `template` with the tensors of a checkpoint."""
    if isinstance(template, Tensor):
        saved = tensors.get(path)
        if saved is None or saved.shape != template.shape or saved.dtype != template.dtype:
            raise CadenError(f"The checkpoint does not fit this run: {path} is missing or has another shape.")
        return saved.to(template.device)
    if template is None:
        return None
    if isinstance(template, bool | int | float):
        return type(template)(restore(torch.empty_like(flatten(template, path)[path]), tensors, path).item())
    return type(template)(*(restore(part, tensors, f"{path}.{n}") for n, part in zip(template._fields, template)))
