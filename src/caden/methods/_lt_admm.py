"""LT-ADMM: Ren, Bastianello, Johansson and Parisini, "Jointly computation- and communication-efficient distributed
learning", 2024 (local training in relaxed ADMM).

    v = x_i;  `local_steps` times  v <- v - gamma grad f_i(v) - beta (rho d_i x_i - sum_j z_ij)
    x_i <- v;  send z_ij - 2 rho x_i to j
    z_ij <- (1 - alpha) z_ij - alpha (the message from j)     if one arrives

One communication per directed edge and round, a different one for each neighbour.

Sleeping agents: arcs without a message stay as they are, also when messages are lost; exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import CadenError, require_number, require_positive
from caden.methods._first_order import local_descent
from caden.methods._registry import EVERYTHING, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    z: Tensor  # (2e, d) arcs


@register(
    {"gamma": 0.2, "beta": 0.1, "rho": 0.4},
    EVERYTHING,
    {"gamma": STEP, "beta": [0.02, 0.05, 0.1], "rho": [0.1, 0.3, 1.0]},
)
def lt_admm(gamma: float = 0.1, beta: float = 0.05, rho: float = 0.3, alpha: float = 0.5) -> Method:
    """LT-ADMM: relaxed ADMM with local gradient steps.

    Args:
        gamma: local step size.
        beta: step size of the dual part; beta rho d_max local_steps must be small.
        rho: penalty.
        alpha: relaxation, in (0, 1).

    Reference: Ren, Bastianello, Johansson and Parisini, 2024.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.lt_admm(0.2, 0.1, 0.4), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("gamma", gamma), require_positive("beta", beta), require_positive("rho", rho)
    if not 0 < require_number("alpha", alpha) < 1:
        raise CadenError(f"`alpha` must lie in (0, 1), got {alpha}.")

    def init(x: Tensor, round: Round) -> State:
        first, second = round.broadcast(x).ends()
        z = rho / 2 * (first + second)
        return State(x, torch.cat([z, z]))

    def step(state: State, round: Round) -> tuple[State, Info]:
        owner = round.edges.owner()
        pull = round.edges.arc_sum(rho * state.x[owner] - state.z)
        x = local_descent(round, state.x, gamma, beta / gamma * pull)
        received, arrived = round.exchange(state.z - 2 * rho * x[owner])
        return State(x, torch.where(arrived, (1 - alpha) * state.z - alpha * received, state.z)), Info()

    return Method(init, step, "lt_admm")
