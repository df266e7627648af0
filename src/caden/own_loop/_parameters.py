"""The parameters of a model that an optimizer trains, as a row."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from caden.errors import CadenError


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; between a GPU and the CPU it goes through pinned memory."""
    if tensor.device.type == device.type:
        return tensor
    if device.type == "cpu":
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.pin_memory().to(device, non_blocking=True)


class Parameters:
    """The trained parameters of a model, in the model's order; frozen ones are left alone.

    The row is of single precision at least, so that parameters in half precision do not lose small changes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in model.named_parameters() if p in owned}
        if len(named) < len(owned):
            raise CadenError("The optimizer has parameters that the model lacks: it belongs to another model.")
        left_out = [n for n, p in model.named_parameters() if p.requires_grad and p not in owned]
        if left_out:
            warnings.warn(
                f"`{left_out[0]}` and others ({len(left_out)}) are not in the optimizer: they are neither trained nor "
                "exchanged.",
                stacklevel=4,
            )
        named = {name: p for name, p in named.items() if p.requires_grad}
        if not named:
            raise CadenError("The optimizer has no parameters to train.")
        self.names, self.tensors = list(named), list[Tensor](named.values())
        self.sizes = [p.numel() for p in self.tensors]
        self.dtype = torch.float32
        for tensor in self.tensors:
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        self.is_rounded = any(p.dtype != self.dtype for p in self.tensors)  # the model cannot hold all of a row
        self.device, self.dim = self.tensors[0].device, sum(self.sizes)

    def views(self, row: Tensor) -> list[Tensor]:
        """Return the parts of a (1, d) row, in the shapes of the parameters."""
        return [part.view(p.shape) for part, p in zip(torch.split(row[0], self.sizes), self.tensors)]

    @torch.no_grad()
    def read(self, views: Sequence[Tensor]) -> None:
        """Copy the parameters into the views of a row."""
        torch._foreach_copy_(list(views), self.tensors)

    def row(self) -> Tensor:
        """Return the parameters as a new row (1, d)."""
        row = torch.empty(1, self.dim, dtype=self.dtype, device=self.device)
        self.read(self.views(row))
        return row

    @torch.no_grad()
    def write(self, row: Tensor) -> None:
        """Set the parameters to a row (1, d)."""
        torch._foreach_copy_(self.tensors, self.views(moved(row, self.device)))

    @torch.no_grad()
    def add_to_gradients(self, views: Sequence[Tensor]) -> None:
        """Add the parts of a row to the gradients; parameters that the loss did not use have none."""
        for parameter, part in zip(self.tensors, views):
            if parameter.grad is None:
                parameter.grad = part.to(parameter.dtype, copy=True)
            else:
                parameter.grad += part

    def gradient(self) -> Tensor:
        """Return the gradients as a new row (1, d)."""
        row = torch.zeros(1, self.dim, dtype=self.dtype, device=self.device)
        for part, parameter in zip(self.views(row), self.tensors):
            if parameter.grad is not None:
                part.copy_(parameter.grad)
        return row

    def not_finite(self, row: Tensor) -> str | None:
        """Return the name of a parameter that is not finite in a row, if there is one."""
        if bool(row.isfinite().all()):
            return None
        return next(name for name, part in zip(self.names, self.views(row)) if not bool(part.isfinite().all()))

    def digest(self) -> int:
        """Return a number of 24 bits that is equal on agents whose parameters have the same names and shapes."""
        names = [name.replace("_orig_mod.", "") for name in self.names]  # of compiled modules
        facts: list[Any] = [self.dtype, *((name, tuple(p.shape)) for name, p in zip(names, self.tensors))]
        return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:3], "big")
