"""Arbitrary functions: one differentiable torch function per agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from caden._tensor.devices import require_device
from caden._tensor.rows import row_numbers
from caden.core import Problem
from caden.errors import CadenError, require_integer

Function = Callable[[Tensor], Tensor]


class Functions(Problem):
    """One function per agent, with gradients by autograd, agent by agent."""

    def __init__(self, functions: Sequence[Function], dim: int, dtype: torch.dtype, device: torch.device):
        self.functions = list(functions)
        self.agents, self.dim, self.dtype, self.device = len(self.functions), dim, dtype, device

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        points = [row.detach().requires_grad_() for row in x]
        values = [self.functions[i](point) for i, point in zip(row_numbers(rows, self.agents), points, strict=True)]
        gradients = [torch.autograd.grad(value, point)[0] for value, point in zip(values, points)]
        return torch.stack(values).detach(), torch.stack(gradients)

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        pairs = zip(row_numbers(rows, self.agents), x, v, strict=True)
        hvp = torch.autograd.functional.hvp
        products = [hvp(self.functions[i], row, u)[1] for i, row, u in pairs]  # type: ignore[no-untyped-call]
        return torch.stack(products)

    def take(self, agents: list[int]) -> Functions:
        return Functions([self.functions[i] for i in agents], self.dim, self.dtype, self.device)


def functions(
    functions: Sequence[Function], dim: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Functions:
    """A problem from m functions of a (d,) tensor, each returning a scalar tensor.

    >>> problem = functions([lambda x: (x - 1).square().sum(), lambda x: (x + 1).square().sum()], dim=2)
    >>> problem.value_and_grad(torch.zeros(2, 2, dtype=torch.float64))[0]
    tensor([2., 2.], dtype=torch.float64)
    """
    if not functions or not all(callable(f) for f in functions):
        raise CadenError("`functions` must be a non-empty sequence of functions, one per agent.")
    return Functions(functions, require_integer("dim", dim, least=1), dtype, require_device(device))
