"""Gradient tracking with local damped L-BFGS: after Zhang, Liu, So and Ling, "Variance-reduced stochastic quasi-Newton
methods for decentralized learning", Parts I and II, IEEE TSP 71, 2023 (their deterministic case).

    x <- W (x - alpha H_i g)      g <- W (g + D)        D the change of the local gradients; g starts at them

H_i is agent i's limited-memory BFGS matrix from its own pairs s (change of x_i) and y = D_i + eps s. Powell's damping
against eps I keeps s.y >= eps/4 |s|^2, so the eigenvalues of H_i are bounded. Written out, it stores theta D_i with
theta = 3/4 eps |s|^2 / (eps |s|^2 - s.y) wherever that is below 1. Before the first pair, H_i = I / (eps + L_i).

With memory = 1 and eps near 0, it is gradient tracking along memoryless BFGS directions, after Wang, Wu and Zhang,
"Decentralized conjugate gradient and memoryless BFGS methods", arXiv:2409.07122, 2024 (who scale H_i in another way).

Two communications per directed edge and one gradient per round.

Sleeping agents: W is doubly stochastic on the awake subgraph, as in gradient tracking; exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden._tensor.rows import row_dots
from caden.core import Info, Method, Round
from caden.curvature import smoothness
from caden.errors import require_integer, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import BROADCAST, register
from caden.solvers._lbfgs import Pairs, direction, no_pairs


class State(NamedTuple):
    x: Tensor  # (k, d)
    tracker: Tensor  # (k, d) g above
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)
    curvature: Tensor  # (k,)
    vectors: Tensor  # as in the L-BFGS solver
    gram: Tensor
    stored: Tensor


@register(
    {"alpha": 0.1, "eps": 0.3},
    BROADCAST,
    {"alpha": {"low": 0.003, "high": 3.0}, "eps": [0.1, 1.0, 10.0], "memory": [10, 1]},
)
def gt_lbfgs(alpha: float = 0.3, eps: float = 1.0, memory: int = 10) -> Method:
    """Gradient tracking along damped L-BFGS directions.

    Args:
        alpha: step size.
        eps: regularisation of the local Hessian estimates.
        memory: number of pairs per agent.

    Reference: after Zhang, Liu, So and Ling, IEEE TSP 71, 2023.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.gt_lbfgs(0.1, eps=0.3), problem, graph, rounds=400)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha), require_positive("eps", eps), require_integer("memory", memory, least=1)

    def init(x: Tensor, round: Round) -> State:
        curvature = smoothness(round.problem, x) if round.curvature is None else round.curvature
        value, gradient = round.problem.value_and_grad(x)
        return State(x, gradient, value, gradient, curvature.to(value), *no_pairs(x, memory))

    def step(state: State, round: Round) -> tuple[State, Info]:
        pairs = Pairs(state.vectors, state.gram, state.stored)
        rows = round.active.squeeze(1).nonzero().flatten()
        shift = torch.full_like(state.x[rows, :1], eps)
        p = torch.zeros_like(state.x)
        p[rows] = direction(pairs, rows, state.tracker[rows], shift, 1 / (shift + state.curvature[rows].unsqueeze(1)))
        x = round.broadcast(state.x + alpha * p).mix()
        value, gradient = refresh(round, x, state.value, state.gradient)
        change = gradient - state.gradient
        tracker = awake(round, round.broadcast(state.tracker + change).mix(), state.tracker)

        s, D = (x - state.x)[rows], change[rows]
        eps_ss, sD = eps * row_dots(s, s), row_dots(s, D)
        moved = eps_ss > 0
        theta = torch.where(sD + eps_ss < eps_ss / 4, 0.75 * eps_ss / -sD, 1.0)
        pairs.write(rows[moved], s[moved], (theta.unsqueeze(1) * D)[moved])
        return State(x, tracker, value, gradient, state.curvature, *pairs), Info(value, gradient)

    return Method(init, step, "gt_lbfgs")
