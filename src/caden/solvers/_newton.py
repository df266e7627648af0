"""Newton steps by conjugate gradients on Hessian-vector products, for all agents together."""

from collections.abc import Callable

import torch
from torch import Tensor

from caden._tensor.rows import row_dots, take_rows
from caden.core import LocalSolver, Objective, Problem, Solved
from caden.errors import CadenError, require_integer, require_number
from caden.solvers._iterate import Iterate, Memory, start


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, iterations: int = 50, tolerance: float = 1e-10
) -> Tensor:
    """Solve A_i p_i = right_i for all rows together, given v -> A v for symmetric A_i.

    A row stops at a residual of `tolerance` times its right-hand side, or where its matrix is not positive definite
    along the search direction. It then returns its current p_i, or its right-hand side if p_i is zero.
    """
    p, r = torch.zeros_like(right), right
    d, square = r.clone(), row_dots(r, r)
    target = tolerance**2 * square
    for _ in range(iterations):
        image = product(d)
        curvature = row_dots(d, image)
        active = (square > target) & (curvature > 0)
        if not bool(active.any()):
            break
        length = torch.where(active, square / curvature, 0).unsqueeze(1)
        p, r = p + length * d, r - length * image
        new = torch.where(active, row_dots(r, r), square)
        d = torch.where(active.unsqueeze(1), r + (new / square).unsqueeze(1) * d, d)
        square = new
    return torch.where((p == 0).all(1, keepdim=True), right, p)


def damped_hessian(
    problem: Problem, x: Tensor, shift: Tensor | float, rows: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Return v -> (hess f_i(x_i) + shift_i I) v, row by row."""
    return lambda v: problem.hvp(x, v, rows) + shift * v


def newton(eps: float = 0.0, iterations: int = 50, tolerance: float = 1e-10) -> LocalSolver:
    """`work[i]` steps v <- v - (hess f_i + (rho_i + eps) I)^-1 grad h_i(v), without a line search.

    The systems are solved by at most `iterations` conjugate-gradient iterations, to `tolerance` times the gradient.
    """
    require_integer("iterations", iterations, least=1)
    if require_number("eps", eps) < 0 or require_number("tolerance", tolerance) < 0:
        raise CadenError(f"`eps` and `tolerance` must not be negative, got {eps} and {tolerance}.")

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory, work)
        for _, rows in now.local_steps():
            at, g = take_rows(now.x, rows), now.full_gradient(rows)
            product = damped_hessian(now.problem, at, take_rows(now.rho, rows) + eps, rows)
            p = conjugate_gradients(product, -g, iterations, tolerance)
            now.move(rows, now.evaluate(rows, p), p)
        return now.solved()

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        return start(problem, x, curvature)

    return LocalSolver(init, solve, "newton", exact=eps == 0)
