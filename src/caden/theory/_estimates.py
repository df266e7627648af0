"""Numbers about a problem: curvature, and how fast local solvers converge."""

from __future__ import annotations

import torch
from torch import Tensor

from caden.core import LocalSolver, Objective, Problem


def smoothness(problem: Problem, x: Tensor, steps: int = 4) -> Tensor:
    """(k,) estimate of each agent's curvature at x: power iteration on differences of gradients.

    L_i = |grad f_i(x + e u) - grad f_i(x)| / e with u turned towards the steepest curvature `steps` times, starting
    from the gradient. Costs `steps` + 1 gradients per agent; a lower bound that is close after a few steps.
    """
    gradient = problem.value_and_grad(x)[1]
    u = gradient
    estimate = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    # The optimal step of a one-sided difference is of the order sqrt(eps) times the size of x.
    length = torch.finfo(x.dtype).eps ** 0.5 * (1 + torch.linalg.vector_norm(x, dim=1, keepdim=True))
    for _ in range(steps):
        norm = torch.linalg.vector_norm(u, dim=1, keepdim=True)
        u = torch.where(norm > 0, u / norm, 0)
        u = (problem.value_and_grad(x + length * u)[1] - gradient) / length
        estimate = torch.maximum(estimate, torch.linalg.vector_norm(u, dim=1))
    return estimate


def curvature_bound(problem: Problem, x: Tensor, steps: int = 50, seed: int = 0) -> Tensor:
    """(k,) largest modulus of an eigenvalue of each Hessian at x: power iteration on Hessian-vector products."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    estimate = x.new_zeros(len(x))
    for _ in range(steps):
        v = problem.hvp(x, v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=1e-300))
        estimate = torch.linalg.vector_norm(v, dim=1)
    return estimate


def paper_estimate(
    problem: Problem, x: Tensor, phases: tuple[tuple[int, float], ...] = ((20, 0.1), (10, 1e-7))
) -> float:
    """L as the paper's experiments estimate it: local gradient steps, the largest ratio over all agents and steps.

    `phases` are (steps, step size). Steps of 1e-7 need float64: in float32 most of them do not change x at all, and the
    ratio measures rounding.
    """
    before: tuple[Tensor, Tensor] | None = None
    largest = 0.0
    for steps, step_size in phases:
        for _ in range(steps):
            gradient = problem.value_and_grad(x)[1]
            if before is not None:
                moved = torch.linalg.vector_norm(x - before[0], dim=1)
                ratio = torch.linalg.vector_norm(gradient - before[1], dim=1) / moved
                largest = max(largest, float(ratio.nan_to_num(0, 0, 0).max()))
            before = (x, gradient)
            x = x - step_size * gradient
    return largest


def hessians(problem: Problem, x: Tensor) -> Tensor:
    """(k, d, d) Hessians at x, column by column."""
    k, d = x.shape
    unit = torch.eye(d, dtype=x.dtype, device=x.device)
    return torch.stack([problem.hvp(x, unit[j].expand(k, d).contiguous()) for j in range(d)], dim=2)


def local_rate(problem: Problem, x: Tensor, rho: Tensor, solver: LocalSolver, steps: int = 5) -> float:
    """The paper's r: |grad h|^2 after tau local steps is at most r^tau times what it was; the worst over agents.

    Measured on the subproblems f_i(v) + rho_i/2 |v - x_i|^2 from x_i, with tau = `steps`; `rho` (k, 1) is mu_z d_i.
    """
    work = torch.full((len(x),), steps, device=x.device)
    memory = solver.init(problem, x, None)
    solved = solver.solve(Objective(problem, torch.zeros_like(x), rho), x, work, memory)
    after = problem.value_and_grad(solved.x)[1] + rho * (solved.x - x)
    ratio = torch.linalg.vector_norm(after, dim=1) / torch.linalg.vector_norm(memory.gradient, dim=1)
    return float(ratio.nan_to_num(0).max() ** (2 / steps))
