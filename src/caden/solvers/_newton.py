"""Newton steps by conjugate gradients on Hessian-vector products, for all agents at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from caden._tensor.rows import row_dots, rows_where, take_rows
from caden.core import Info, LocalSolver, Objective, Problem, Solved
from caden.errors import CadenError, require_integer, require_number
from caden.solvers._iterate import Iterate, Memory, start


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, iterations: int = 50, tolerance: float = 1e-10
) -> Tensor:
    """Solve A_i p_i = right_i for all rows at once, given v -> A v for symmetric A_i.

    A row stops at a residual of `tolerance` times its right-hand side, or where the matrix turns out not to be positive
    definite along the search direction: then with what it has, or with its right-hand side if that is nothing.
    """
    p, r = torch.zeros_like(right), right
    d, square = r.clone(), row_dots(r, r)
    enough = tolerance**2 * square
    for _ in range(iterations):
        image = product(d)
        curved = row_dots(d, image)
        go = (square > enough) & (curved > 0)
        if not bool(go.any()):
            break
        length = torch.where(go, square / curved, 0).unsqueeze(1)
        p, r = p + length * d, r - length * image
        new = torch.where(go, row_dots(r, r), square)
        d = torch.where(go.unsqueeze(1), r + (new / square).unsqueeze(1) * d, d)
        square = new
    return torch.where((p == 0).all(1, keepdim=True), right, p)


def damped_hessian(
    problem: Problem, x: Tensor, shift: Tensor | float, rows: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """v -> (hess f_i(x_i) + shift_i I) v, row by row."""
    return lambda v: problem.hvp(x, v, rows) + shift * v


def newton(eps: float = 0.0, iterations: int = 50, tolerance: float = 1e-10) -> LocalSolver:
    """`work[i]` steps v <- v - (hess f_i + (rho_i + eps) I)^-1 grad h_i(v), without a line search.

    The systems are solved by at most `iterations` of conjugate gradients, to `tolerance` times the gradient.
    """
    require_integer("iterations", iterations, least=1)
    if require_number("eps", eps) < 0 or require_number("tolerance", tolerance) < 0:
        raise CadenError(f"`eps` and `tolerance` must not be negative, got {eps} and {tolerance}.")

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory, work)
        for iteration in range(int(work.max())):
            rows = rows_where(work > iteration)
            at, g = take_rows(now.x, rows), now.full_gradient(rows)
            product = damped_hessian(now.problem, at, take_rows(now.rho, rows) + eps, rows)
            p = conjugate_gradients(product, -g, iterations, tolerance)
            now.move(rows, now.evaluate(rows, p), p)
        return Solved(now.x, Memory(now.value, now.gradient, now.curvature), Info(now.value, now.gradient))

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        return start(problem, x, curvature)

    return LocalSolver(init, solve, "newton", exact=eps == 0)
