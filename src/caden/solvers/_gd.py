"""Gradient descent on the subproblems: CADEN-GD's local solver."""

from torch import Tensor

from caden._tensor.rows import take_rows
from caden.core import LocalSolver, Objective, Problem, Solved
from caden.curvature import smoothness
from caden.errors import require_positive
from caden.solvers._iterate import Iterate, Memory, start


def gd(step_size: float | None = None, curvature: float | None = None) -> LocalSolver:
    """`work[i]` steps v <- v - step_i grad h_i(v).

    By default step_i = 1 / (rho_i + L_i), where L_i is the largest curvature met by the warm-up (otherwise by a few
    probing gradients at the start) and by the steps so far. `curvature` fixes L_i, `step_size` fixes the step itself.
    """
    if step_size is not None:
        require_positive("step_size", step_size)
    if curvature is not None:
        require_positive("curvature", curvature)

    def init(problem: Problem, x: Tensor, known: Tensor | None) -> Memory:
        if step_size is None and curvature is None and known is None:
            known = smoothness(problem, x)
        return start(problem, x, known)

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory, work)
        for _, rows in now.local_steps():
            g = now.full_gradient(rows)
            if step_size is not None:
                p = -step_size * g
            elif curvature is not None:
                p = -g / (take_rows(now.rho, rows) + curvature)
            else:
                p = -now.safe_scale(rows, g) * g
            now.move(rows, now.evaluate(rows, p), p)
        return now.solved()

    return LocalSolver(init, solve, "gd")
