"""Estimates of the curvature of the f_i from gradient differences and from Hessian-vector products."""

import torch
from torch import Tensor

from caden.core import Problem

Phases = tuple[tuple[int, float], ...]  # (steps, step size) of each phase, in order


def descend(problem: Problem, x: Tensor, phases: Phases) -> tuple[Tensor, list[Tensor]]:
    """Take local gradient steps; return x and, per phase, the (k,) largest |change of gradient| / |change of x|.

    This is how the paper estimates L. A step costs one gradient, so the last step has no ratio. A phase without ratios
    gives 0. Steps so short that x hardly moves measure rounding errors: 1e-7 needs float64.
    """
    ratios = [x.new_zeros(len(x)) for _ in phases]
    previous: tuple[Tensor, Tensor] | None = None
    previous_phase = 0
    for phase, (steps, step_size) in enumerate(phases):
        for _ in range(steps):
            gradient = problem.value_and_grad(x)[1]
            if previous is not None:
                dx, dg = (torch.linalg.vector_norm(a - b, dim=1) for a, b in zip((x, gradient), previous))
                ratios[previous_phase] = torch.maximum(ratios[previous_phase], (dg / dx).nan_to_num(0, 0))
            previous, previous_phase = (x, gradient), phase
            x = x - step_size * gradient
    return x, ratios


def paper_estimate(problem: Problem, x: Tensor, phases: Phases = ((20, 0.1), (10, 1e-7))) -> float:
    """Estimate L as the paper's experiments do: the largest ratio of `descend` over all agents and steps."""
    return max(float(ratio.max()) for ratio in descend(problem, x, phases)[1])


def smoothness(problem: Problem, x: Tensor, steps: int = 4) -> Tensor:
    """Estimate each agent's curvature at x, (k,), by power iteration on gradient differences.

    L_i = |grad f_i(x + e u) - grad f_i(x)| / e with u turned towards the largest curvature `steps` times, starting from
    the gradient. Costs `steps` + 1 gradients per agent. The result is a lower bound, close after a few steps.
    """
    known = problem.known_curvature(x)
    if known is not None:
        return known
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
    """Estimate the largest |eigenvalue| of each Hessian at x, (k,), by power iteration on Hessian-vector products."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    estimate = x.new_zeros(len(x))
    for _ in range(steps):
        v = problem.hvp(x, v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=1e-300))
        estimate = torch.linalg.vector_norm(v, dim=1)
    return estimate


def hessians(problem: Problem, x: Tensor) -> Tensor:
    """Compute the (k, d, d) Hessians at x, column by column."""
    k, d = x.shape
    unit = torch.eye(d, dtype=x.dtype, device=x.device)
    return torch.stack([problem.hvp(x, unit[j].expand(k, d).contiguous()) for j in range(d)], dim=2)
