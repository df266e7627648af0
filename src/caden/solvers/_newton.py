"""Newton steps by conjugate gradients on Hessian-vector products, for all agents at once."""

from __future__ import annotations

import torch
from torch import Tensor

from caden.core import Info, LocalSolver, Objective, Problem, Solved
from caden.errors import CadenError, number, whole
from caden.solvers._iterate import Iterate, Memory, dot, index, pick, start


def conjugate_gradients(
    problem: Problem,
    x: Tensor,
    shift: Tensor,
    right: Tensor,
    rows: Tensor | None = None,
    iterations: int = 50,
    tolerance: float = 1e-10,
) -> Tensor:
    """Solve (hess f_i(x_i) + shift_i I) p_i = right_i for all rows at once.

    A row stops at a residual of `tolerance` times its right-hand side, or where the matrix turns out not to be positive
    definite along the search direction: then with what it has, or with its right-hand side if that is nothing.
    """
    p, r = torch.zeros_like(right), right
    d, square = r.clone(), dot(r, r)
    enough = tolerance**2 * square
    for _ in range(iterations):
        product = problem.hvp(x, d, rows) + shift * d
        curved = dot(d, product)
        go = (square > enough) & (curved > 0)
        if not bool(go.any()):
            break
        length = torch.where(go, square / curved, 0).unsqueeze(1)
        p, r = p + length * d, r - length * product
        new = torch.where(go, dot(r, r), square)
        d = torch.where(go.unsqueeze(1), r + (new / square).unsqueeze(1) * d, d)
        square = new
    return torch.where((p == 0).all(1, keepdim=True), right, p)


def newton(eps: float = 0.0, iterations: int = 50, tolerance: float = 1e-10) -> LocalSolver:
    """`work[i]` steps v <- v - (hess f_i + (rho_i + eps) I)^-1 grad h_i(v), without a line search.

    The systems are solved by at most `iterations` of conjugate gradients, to `tolerance` times the gradient.
    """
    whole("iterations", iterations, least=1)
    if number("eps", eps) < 0 or number("tolerance", tolerance) < 0:
        raise CadenError(f"`eps` and `tolerance` must not be negative, got {eps} and {tolerance}.")

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory)
        for iteration in range(int(work.max())):
            rows = index(work > iteration)
            at, g = pick(now.x, rows), now.full_gradient(rows)
            p = conjugate_gradients(now.problem, at, pick(now.rho, rows) + eps, -g, rows, iterations, tolerance)
            now.move(rows, now.look(rows, p), p)
        return Solved(now.x, Memory(now.value, now.gradient, now.curvature), Info(now.value, now.gradient))

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        return start(problem, x, curvature)

    return LocalSolver(init, solve, "newton")
