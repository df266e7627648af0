"""ADMM-tracking gradient: Carnevale, Bastianello, Notarstefano and Carli, "ADMM-tracking gradient for distributed
optimization over asynchronous and unreliable networks", IEEE TAC 70(8), 2025.

Consensus ADMM tracks the means of the x_i and of their gradients. Agent i holds zy_ij and zs_ij, which start at 0:

    y_i = (x_i + sum_j zy_ij) / (1 + rho d_i)
    s_i = (grad f_i(x_i) + sum_j zs_ij) / (1 + rho d_i)
    x_i <- (1 - gamma) x_i + gamma (y_i - delta s_i)
    send 2 rho y_i - zy_ij and 2 rho s_i - zs_ij to j
    zy_ij <- (1 - alpha) zy_ij + alpha (the message from j),  zs_ij alike,     if one arrives

Two communications per directed edge and round, different ones for each neighbour; one gradient.

Sleeping agents: arcs without a message stay as they are, also when messages are lost; exact. The two messages of an arc
may be lost one without the other.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_fraction, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import EVERYTHING, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    model_arcs: Tensor  # (2e, d) zy above
    gradient_arcs: Tensor  # (2e, d) zs above
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register(
    {"delta": 0.3, "rho": 0.3},
    EVERYTHING,
    {"delta": STEP, "rho": [0.1, 0.3, 1.0], "gamma": [0.3, 0.5, 0.8]},
)
def atg(delta: float = 0.5, rho: float = 0.3, alpha: float = 0.9, gamma: float = 0.5) -> Method:
    """ADMM-tracking gradient: consensus ADMM on models and on gradients, with a variable per arc.

    Args:
        delta: step size.
        rho: penalty of the consensus problems.
        alpha: relaxation, in (0, 1).
        gamma: fraction of the way to the new point, in (0, 1].

    Reference: Carnevale, Bastianello, Notarstefano and Carli, IEEE TAC 70(8), 2025.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.atg(0.5), problem, graph, rounds=600, messages={"loss": 0.2})
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("delta", delta), require_positive("rho", rho)
    require_fraction("alpha", alpha)
    require_fraction("gamma", gamma, "(0, 1]")

    def exchanged(z: Tensor, estimate: Tensor, round: Round) -> Tensor:
        """Return the arcs after the messages of one of the two consensus problems."""
        received, arrived = round.exchange(2 * rho * estimate[round.edges.owner()] - z)
        return torch.where(arrived, (1 - alpha) * z + alpha * received, z)

    def init(x: Tensor, round: Round) -> State:
        arcs = x.new_zeros(2 * len(round.edges.first), x.shape[1])
        return State(x, arcs, arcs.clone(), *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        share = 1 / (1 + rho * round.degree)
        y = share * (state.x + round.edges.arc_sum(state.model_arcs))
        s = share * (state.gradient + round.edges.arc_sum(state.gradient_arcs))
        x = awake(round, (1 - gamma) * state.x + gamma * (y - delta * s), state.x)
        model_arcs, gradient_arcs = exchanged(state.model_arcs, y, round), exchanged(state.gradient_arcs, s, round)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, model_arcs, gradient_arcs, value, gradient), Info(value, gradient)

    return Method(init, step, "atg")
