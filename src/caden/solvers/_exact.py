"""Exact local solves for quadratics, the reference in the tests of the other solvers and the edge form."""

import torch
from torch import Tensor

from caden._tensor.rows import rows_where, solve_rows, take_rows
from caden.core import LocalSolver, Objective, Problem, Solved
from caden.errors import CadenError
from caden.solvers._iterate import Iterate, Memory, start


def exact() -> LocalSolver:
    """One Newton step with the true Hessian, which solves the subproblem if f_i is quadratic.

    The problem must have `hessian` (m, d, d), as `problems.quadratic` does. Any positive amount of work is one solve.
    """

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        if problem.hessian is None:
            raise CadenError("`solver=exact()` needs a quadratic problem; use `lbfgs()` for others.")
        return start(problem, x, curvature)

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory, work)
        rows = rows_where(work > 0)
        identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        assert objective.problem.hessian is not None  # checked by `init`
        hessian = take_rows(objective.problem.hessian, rows) + take_rows(now.rho, rows).unsqueeze(2) * identity
        p = -solve_rows(hessian, now.full_gradient(rows))
        now.move(rows, now.evaluate(rows, p), p)
        return now.solved()

    return LocalSolver(init, solve, "exact", exact=True)
