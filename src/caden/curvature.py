"""How steep the f_i are: estimates from differences of gradients and from Hessian-vector products."""

import torch
from torch import Tensor

from caden.core import Problem

Phases = tuple[tuple[int, float], ...]  # (steps, step size), one after the other


def descend(problem: Problem, x: Tensor, phases: Phases) -> tuple[Tensor, list[Tensor]]:
    """Local gradient steps; and, for each phase, (k,) the largest |change of gradient| / |change of x| of its steps.

    This is how the paper estimates L. One gradient per step, so that the last step has no ratio; 0 where there is none.
    Steps so short that x hardly moves measure rounding: 1e-7 needs float64.
    """
    ratios = [x.new_zeros(len(x)) for _ in phases]
    before: tuple[Tensor, Tensor] | None = None
    last = 0
    for phase, (steps, step_size) in enumerate(phases):
        for _ in range(steps):
            gradient = problem.value_and_grad(x)[1]
            if before is not None:
                moved, bent = (torch.linalg.vector_norm(a - b, dim=1) for a, b in zip((x, gradient), before))
                ratios[last] = torch.maximum(ratios[last], (bent / moved).nan_to_num(0, 0))
            before, last = (x, gradient), phase
            x = x - step_size * gradient
    return x, ratios


def paper_estimate(problem: Problem, x: Tensor, phases: Phases = ((20, 0.1), (10, 1e-7))) -> float:
    """L as the paper's experiments estimate it: the largest ratio of `descend` over all agents and steps."""
    return max(float(ratio.max()) for ratio in descend(problem, x, phases)[1])


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


def hessians(problem: Problem, x: Tensor) -> Tensor:
    """(k, d, d) Hessians at x, column by column."""
    k, d = x.shape
    unit = torch.eye(d, dtype=x.dtype, device=x.device)
    return torch.stack([problem.hvp(x, unit[j].expand(k, d).contiguous()) for j in range(d)], dim=2)
