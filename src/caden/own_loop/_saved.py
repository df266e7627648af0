"""The state of a model and its optimizer as tensors by name, for checkpoints without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from caden.errors import CadenError


def _text(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def save(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the buffers of the model and the state of the optimizer; the parameters are in the row."""
    saved = {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}
    state = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                saved[f"optimizer.{index}.{key}"] = value
            elif _is_plain(value):
                plain.setdefault(str(index), {})[key] = value
            else:
                raise CadenError(f"The optimizer's state `{key}` is neither a tensor nor plain: it cannot be saved.")
    groups = [{k: v for k, v in group.items() if k != "params" and _is_plain(v)} for group in state["param_groups"]]
    return {**saved, "optimizer": _text({"plain": plain, "groups": groups})}


def load(saved: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
    """Restore what `save` returned."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if f"buffer.{name}" in saved:
                buffer.copy_(saved[f"buffer.{name}"])
    text = json.loads(bytes(saved["optimizer"].tolist()))
    state = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {int(index): dict(plain) for index, plain in text["plain"].items()}
    for name, tensor in saved.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            entries.setdefault(int(index), {})[key] = tensor.clone()
    for group, known in zip(state["param_groups"], text["groups"]):
        group.update(known)
    optimizer.load_state_dict({"state": entries, "param_groups": state["param_groups"]})
