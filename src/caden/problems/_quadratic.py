"""Quadratics f_i(x) = x'A_i x / 2 - b_i'x: problems whose minimiser is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caden._tensor.compiled import compiles, loops
from caden._tensor.devices import require_device
from caden._tensor.rows import batched_mv, row_dots, take_rows, view_rows
from caden.core import Problem
from caden.errors import CadenError, require_integer, require_positive

_COMPILED = "caden.problems._compiled"
_LARGE = 400  # dimension from which the library for matrix products is as fast as compiled loops


class Quadratic(Problem):
    """m quadratics; `hessian` (m, d, d), `linear` (m, d), and the centralised minimiser `solution` (d,)."""

    hessian: Tensor

    def __init__(self, hessian: Tensor, linear: Tensor):
        self.hessian, self.linear = hessian, linear
        self.agents, self.dim = linear.shape
        self.dtype, self.device = linear.dtype, linear.device

    @property
    def solution(self) -> Tensor:
        """The minimiser of sum f_i."""
        minimiser: Tensor = torch.linalg.solve(self.hessian.sum(0), self.linear.sum(0))
        return minimiser

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.dim < _LARGE and compiles(x):
            results: tuple[Tensor, Tensor] = loops(_COMPILED).quadratic(self.hessian, self.linear, x, rows)
            return results
        linear = take_rows(self.linear, rows)
        product = self.hvp(x, x, rows)
        return row_dots(x, product / 2 - linear), product - linear

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return batched_mv(view_rows(self.hessian, rows), v)

    def take(self, agents: list[int]) -> Quadratic:
        return Quadratic(self.hessian[agents], self.linear[agents])


def quadratics(A: Any, b: Any, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Quadratic:
    """The quadratics f_i(x) = x'A_i x / 2 - b_i'x for symmetric A (m, d, d) and b (m, d).

    >>> quadratics([[[2.0]], [[1.0]]], [[1.0], [2.0]]).solution
    tensor([1.], dtype=torch.float64)
    """
    require_device(device)
    A, b = (torch.as_tensor(part, device=device).to(dtype) for part in (A, b))
    if A.ndim != 3 or A.shape[1] != A.shape[2] or b.shape != A.shape[:2]:
        raise CadenError(f"`A` must have shape (m, d, d) and `b` (m, d), got {tuple(A.shape)} and {tuple(b.shape)}.")
    broken = ~(A.isfinite().all(2).all(1) & b.isfinite().all(1))
    if bool(broken.any()):
        raise CadenError(f"`A` or `b` of agent {int(broken.nonzero()[0])} has values that are not finite.")
    if not torch.allclose(A, A.mT):
        raise CadenError("`A` must be symmetric.")
    return Quadratic(A, b)


def quadratic(
    agents: int = 20,
    dim: int = 5,
    seed: int = 0,
    condition: float = 10.0,
    common: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Quadratic:
    """Random strongly convex quadratics, one per agent: eigenvalues from 1/condition to 1, b standard normal.

    The mean of agents with eigenvectors of their own is far better conditioned than each of them. With `common` they
    share eigenvectors, and eigenvalues up to factors between 1/2 and 1, so that the mean has about `condition` too.

    >>> quadratic(agents=3, dim=2).solution.shape
    torch.Size([2])
    """
    require_integer("agents", agents, least=1), require_integer("dim", dim, least=1), require_integer("seed", seed)
    if require_positive("condition", condition) < 1:
        raise CadenError(f"`condition` must be at least 1, got {condition}.")
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(agents, dim, dim, generator=generator, dtype=torch.float64))[0]
    spread = torch.rand(agents, dim, generator=generator, dtype=torch.float64)
    if dim > 1:
        spread[:, 0], spread[:, 1] = 0, 1
    eigenvalues = condition**-spread
    if common:
        basis, eigenvalues = basis[:1], eigenvalues[:1] / (1 + torch.rand(agents, dim, generator=generator).double())
    A = basis @ torch.diag_embed(eigenvalues) @ basis.mT
    b = torch.randn(agents, dim, generator=generator, dtype=torch.float64)
    return quadratics((A + A.mT) / 2, b, dtype, device)
