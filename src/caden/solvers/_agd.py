"""Accelerated gradient descent on the subproblems.

Beck and Teboulle, "A fast iterative shrinkage-thresholding algorithm for linear inverse problems", SIAM J. Imaging Sci.
2(1), 2009.
"""

from math import sqrt

import torch
from torch import Tensor

from caden._tensor.rows import take_rows
from caden.core import LocalSolver, Objective, Problem, Solved
from caden.errors import require_positive
from caden.solvers._gd import gd
from caden.solvers._iterate import Iterate, Memory


def agd(step_size: float | None = None) -> LocalSolver:
    """`work[i]` steps with Nesterov's momentum, restarted in every round.

    With w at the starting point: v' = w - step_i grad h_i(w), then w = v' + (t - 1)/t' (v' - v), t' = (1 + sqrt(1 + 4
    t^2))/2 and t = 1 at first. The last v' is the result. `step_size` defaults to that of `gd`.
    """
    if step_size is not None:
        require_positive("step_size", step_size)

    def init(problem: Problem, x: Tensor, known: Tensor | None) -> Memory:
        memory: Memory = gd(step_size).init(problem, x, known)
        return memory

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory, work)  # at w
        v, t = x.clone(), 1.0
        for iteration, rows in now.local_steps():
            g = now.full_gradient(rows)
            new = take_rows(now.x, rows) - (now.safe_scale(rows, g) if step_size is None else step_size) * g
            next_t = (1 + sqrt(1 + 4 * t * t)) / 2
            continues = (take_rows(work, rows) > iteration + 1).unsqueeze(1)
            w = torch.where(continues, new + (t - 1) / next_t * (new - take_rows(v, rows)), new)
            p = w - take_rows(now.x, rows)
            now.move(rows, now.evaluate(rows, p), p)
            v = new if rows is None else v.index_copy(0, rows, new)
            t = next_t
        return now.solved()

    return LocalSolver(init, solve, "agd")
