"""Gradient descent on the subproblems: CADEN-GD's local solver."""

from __future__ import annotations

from torch import Tensor

from caden.core import Info, LocalSolver, Objective, Problem, Solved
from caden.errors import positive
from caden.solvers._iterate import Iterate, Memory, index, start
from caden.theory import smoothness


def gd(step: float | None = None) -> LocalSolver:
    """`work[i]` steps v <- v - step_i grad h_i(v).

    By default step_i = 1 / (rho_i + L_i), with L_i the largest curvature that the warm-up (else a few probing gradients
    at the start) and the steps so far have met.
    """
    if step is not None:
        positive("step", step)

    def init(problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        if step is None and curvature is None:
            curvature = smoothness(problem, x)
        return start(problem, x, curvature)

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Memory) -> Solved:
        now = Iterate(objective, x, memory)
        for iteration in range(int(work.max())):
            live = work > iteration
            rows = index(live)
            g = now.full_gradient(rows)
            p = -(now.safe_scale(rows, g) if step is None else step) * g
            now.move(rows, now.look(rows, p), p)
        return Solved(now.x, Memory(now.value, now.gradient, now.curvature), Info(now.value, now.gradient))

    return LocalSolver(init, solve, "gd")
