"""Numbers about a problem: for now the Lipschitz constant of its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from caden.core import Problem


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
