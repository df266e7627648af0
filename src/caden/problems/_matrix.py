"""Low-rank matrices: factorisation of a matrix of which each agent sees some entries, and principal components.

Both are non-convex with saddle points, among them zero, so runs start at a small random point.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from caden._tensor.devices import require_device
from caden._tensor.rows import row_dots, take_rows
from caden.core import Problem
from caden.errors import CadenError, require_integer, require_number


class Factorisation(Problem):
    """f_i(U, V) = 1/(2 n_i) sum over the n_i entries of agent i of (U V' - M)^2 + l2/2 (|U|^2 + |V|^2).

    x holds U, row by row, and then V.
    """

    start: Tensor

    def __init__(self, matrix: Tensor, weights: Tensor, rank: int, l2: float, start: Tensor):
        self.matrix, self.weights, self.rank, self.l2, self.start = matrix, weights, rank, l2, start
        self.agents, self.dim = len(weights), len(start)  # weights (m, rows, columns): 1/n_i or 0
        self.dtype, self.device = matrix.dtype, matrix.device

    def _factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u, v = x.tensor_split([self.rank * len(self.matrix)], 1)
        return u.reshape(len(x), -1, self.rank), v.reshape(len(x), -1, self.rank)

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        (u, v), weights = self._factors(x), take_rows(self.weights, rows)
        apart = u @ v.mT - self.matrix
        error = weights * apart
        gradient = torch.cat([(error @ v).flatten(1), (error.mT @ u).flatten(1)], 1) + self.l2 * x
        return (error * apart).sum((1, 2)) / 2 + self.l2 / 2 * row_dots(x, x), gradient

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        (a, b), (da, db), weights = self._factors(x), self._factors(v), take_rows(self.weights, rows)
        error, moved = weights * (a @ b.mT - self.matrix), weights * (da @ b.mT + a @ db.mT)
        parts = (moved @ b + error @ db).flatten(1), (moved.mT @ a + error.mT @ da).flatten(1)
        return torch.cat(parts, 1) + self.l2 * v

    def take(self, agents: list[int]) -> Factorisation:
        return Factorisation(self.matrix, self.weights[agents], self.rank, self.l2, self.start)


def factorisation(
    agents: int = 20,
    rows: int = 20,
    columns: int = 15,
    rank: int = 3,
    seen: float = 0.3,
    noise: float = 0.1,
    l2: float = 0.01,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Factorisation:
    """A random rows x columns matrix of the given rank plus noise; each agent sees a fraction `seen` of its entries.

    >>> factorisation(agents=3, rows=4, columns=5, rank=2).dim
    18
    """
    for name, value in (("agents", agents), ("rows", rows), ("columns", columns), ("rank", rank)):
        require_integer(name, value, least=1)
    if not 0 < require_number("seen", seen) <= 1:
        raise CadenError(f"`seen` must lie in (0, 1], got {seen}.")
    if require_number("noise", noise) < 0 or require_number("l2", l2) < 0:
        raise CadenError(f"`noise` and `l2` must not be negative, got {noise} and {l2}.")
    generator = torch.Generator().manual_seed(require_integer("seed", seed))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    matrix = normal(rows, rank) @ normal(columns, rank).mT / math.sqrt(rank) + noise * normal(rows, columns)
    count = max(1, round(seen * rows * columns))
    order = torch.rand(agents, rows * columns, generator=generator).argsort(1)
    weights = (order < count).double().reshape(agents, rows, columns) / count
    start = normal((rows + columns) * rank) / math.sqrt(rank)
    matrix, weights, start = (part.to(require_device(device), dtype) for part in (matrix, weights, start))
    return Factorisation(matrix, weights, rank, l2, start)


class PrincipalComponents(Problem):
    """f_i(X) = |X X' - C_i|^2 / 4: the minimiser of the sum spans the leading eigenvectors of the mean of the C_i."""

    start: Tensor

    def __init__(self, covariance: Tensor, start: Tensor):
        self.covariance, self.start = covariance, start  # (m, p, p), (p r,)
        self.agents, self.dim = len(covariance), len(start)
        self.dtype, self.device = covariance.dtype, covariance.device

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        covariance = take_rows(self.covariance, rows)
        factor = x.reshape(*covariance.shape[:2], -1)
        apart = factor @ factor.mT - covariance
        return apart.square().sum((1, 2)) / 4, (apart @ factor).flatten(1)

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        covariance = take_rows(self.covariance, rows)
        factor, moved = (part.reshape(*covariance.shape[:2], -1) for part in (x, v))
        change = moved @ factor.mT + factor @ moved.mT
        return (change @ factor + (factor @ factor.mT - covariance) @ moved).flatten(1)

    def take(self, agents: list[int]) -> PrincipalComponents:
        return PrincipalComponents(self.covariance[agents], self.start)


def pca(
    agents: int = 20,
    dim: int = 20,
    components: int = 3,
    samples: int = 50,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> PrincipalComponents:
    """Principal components of random data with a spectrum that decays as 1, 1/2, 1/3, ..., `samples` per agent.

    >>> pca(agents=2, dim=4, components=1).dim
    4
    """
    for name, value in (("agents", agents), ("dim", dim), ("components", components), ("samples", samples)):
        require_integer(name, value, least=1)
    if components > dim:
        raise CadenError(f"`components` must be at most {dim}, the dimension, got {components}.")
    generator = torch.Generator().manual_seed(require_integer("seed", seed))
    scale = torch.arange(1, dim + 1, dtype=torch.float64) ** -0.5
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    points = torch.randn(agents, samples, dim, generator=generator, dtype=torch.float64) * scale @ basis.mT
    start = torch.randn(dim * components, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    covariance = (points.mT @ points / samples).to(require_device(device), dtype)
    return PrincipalComponents(covariance, start.to(covariance))
