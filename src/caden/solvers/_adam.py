"""Adam on the subproblems (Kingma and Ba, ICLR 2015), restarted in every round as in DiNNO."""

import torch
from torch import Tensor

from caden._tensor.rows import take_rows
from caden.core import LocalSolver, Objective, Problem, Solved
from caden.errors import CadenError, require_number, require_positive
from caden.solvers._iterate import Iterate, Memory, start


def adam(step_size: float = 5e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> LocalSolver:
    """`work[i]` Adam steps on each subproblem; `step_size` is the learning rate.

    ``methods.caden(mu_z=2 * rho, growth=1.0003, solver=adam())`` is the fair counterpart of DiNNO.
    """
    require_positive("step_size", step_size), require_positive("eps", eps)
    if not (0 <= require_number("beta1", beta1) < 1 and 0 <= require_number("beta2", beta2) < 1):
        raise CadenError(f"`beta1` and `beta2` must lie in [0, 1), got {beta1} and {beta2}.")

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory, work, fresh=True)
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        for iteration, rows in now.local_steps():
            g = now.full_gradient(rows)
            mean = take_rows(first, rows).mul(beta1).add_(g, alpha=1 - beta1)
            square = take_rows(second, rows).mul(beta2).addcmul_(g, g, value=1 - beta2)
            if rows is None:
                first, second = mean, square
            else:
                first[rows], second[rows] = mean, square
            scale = (square / (1 - beta2 ** (iteration + 1))).sqrt_().add_(eps)
            p = -step_size / (1 - beta1 ** (iteration + 1)) * mean / scale
            now.advance(rows, take_rows(now.x, rows) + p)
        return now.solved()

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        return start(problem, x, curvature)

    return LocalSolver(init, solve, "adam", fresh=True)
