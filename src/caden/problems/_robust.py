"""Robust regression with the pseudo-Huber loss."""

from __future__ import annotations

import torch
from torch import Tensor

from caden._tensor.devices import require_device
from caden._tensor.rows import batched_mv, take_rows, view_rows
from caden.core import Problem
from caden.errors import CadenError, require_integer, require_number, require_positive


class Robust(Problem):
    """f_i(x) = mean of delta^2 (sqrt(1 + (r/delta)^2) - 1) over the residuals r = a.x - b of agent i."""

    def __init__(self, features: Tensor, values: Tensor, delta: float):
        self.features, self.values, self.delta = features, values, delta  # (m, n, d), (m, n)
        self.agents, self.samples, self.dim = features.shape
        self.dtype, self.device = features.dtype, features.device

    def _residuals(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        data = view_rows(self.features, rows)
        residual = batched_mv(data, x) - take_rows(self.values, rows)
        return data, residual, (1 + (residual / self.delta) ** 2).sqrt()

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        data, residual, root = self._residuals(x, rows)
        return self.delta**2 * (root - 1).mean(1), batched_mv(data.mT, residual / root) / self.samples

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        data, _, root = self._residuals(x, rows)
        return batched_mv(data.mT, batched_mv(data, v) / root**3) / self.samples

    def take(self, agents: list[int]) -> Robust:
        return Robust(self.features[agents], self.values[agents], self.delta)


def robust(
    agents: int = 20,
    dim: int = 10,
    samples: int = 50,
    delta: float = 0.5,
    outliers: float = 0.1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Robust:
    """Linear regression on random data, of which a fraction `outliers` is far off.

    >>> robust(agents=3, dim=2).value_and_grad(torch.zeros(3, 2, dtype=torch.float64))[1].shape
    torch.Size([3, 2])
    """
    for name, value in (("agents", agents), ("dim", dim), ("samples", samples)):
        require_integer(name, value, least=1)
    require_positive("delta", delta)
    if not 0 <= require_number("outliers", outliers) < 1:
        raise CadenError(f"`outliers` must lie in [0, 1), got {outliers}.")
    generator = torch.Generator().manual_seed(require_integer("seed", seed))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    truth, features = normal(dim), normal(agents, samples, dim) + normal(agents, 1, dim) / 2
    off = torch.rand(agents, samples, generator=generator, dtype=torch.float64) < outliers
    values = features @ truth + 0.1 * normal(agents, samples) + 10 * off * normal(agents, samples)
    features = features.to(require_device(device), dtype)
    return Robust(features, values.to(features), delta)
