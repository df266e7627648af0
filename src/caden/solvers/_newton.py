"""Newton steps by conjugate gradients on Hessian-vector products, for all agents at once."""

from __future__ import annotations

import torch
from torch import Tensor

from caden.core import Info, LocalSolver, Objective, Problem, Solved
from caden.errors import CadenError, number, whole
from caden.solvers._iterate import Iterate, Memory, dot, index, pick, start


def newton(eps: float = 0.0, iterations: int = 50, tolerance: float = 1e-10) -> LocalSolver:
    """`work[i]` steps v <- v - (hess f_i + (rho_i + eps) I)^-1 grad h_i(v), without a line search.

    Conjugate gradients stop at `iterations` or at a residual of `tolerance` times the gradient, or where the matrix
    turns out not to be positive definite along the search direction (then with what they have, at least a gradient).
    """
    whole("iterations", iterations, least=1)
    if number("eps", eps) < 0 or number("tolerance", tolerance) < 0:
        raise CadenError(f"`eps` and `tolerance` must not be negative, got {eps} and {tolerance}.")

    def direction(now: Iterate, rows: Tensor | None, g: Tensor) -> Tensor:
        shift = pick(now.rho, rows) + eps
        p, r = torch.zeros_like(g), -g
        d, square = r.clone(), dot(r, r)
        enough = tolerance**2 * square
        for n in range(iterations):
            product = now.problem.hvp(pick(now.x, rows), d, rows) + shift * d
            curved = dot(d, product)
            go = (square > enough) & (curved > 0)
            if not bool(go.any()):
                return torch.where((p == 0).all(1, keepdim=True) & (n == 0), -g, p)
            length = torch.where(go, square / curved, 0).unsqueeze(1)
            p, r = p + length * d, r - length * product
            new = torch.where(go, dot(r, r), square)
            d = torch.where(go.unsqueeze(1), r + (new / square).unsqueeze(1) * d, d)
            square = new
        return p

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory)
        for iteration in range(int(work.max())):
            rows = index(work > iteration)
            p = direction(now, rows, now.full_gradient(rows))
            now.move(rows, now.look(rows, p), p)
        return Solved(now.x, Memory(now.value, now.gradient, now.curvature), Info(now.value, now.gradient))

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        return start(problem, x, curvature)

    return LocalSolver(init, solve, "newton")
