"""Decentralised ProxSkip: Mishchenko, Malinovsky, Stich and Richtarik, "ProxSkip: yes! Local gradient steps provably
lead to communication acceleration! Finally!", ICML 2022, in its decentralised form.

    z = x - alpha grad f(x) - y
    with probability p (one coin for all):  send z;  x <- z - (z - W z) / (2 chi);  y <- y + p (z - x)
    else:                                   x <- z

One communication per directed edge with probability p, else none; one gradient per round.

Sleeping agents: W is doubly stochastic on the awake subgraph, sum y = 0 in every round; exact.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import CadenError, require_fraction, require_number, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import BROADCAST, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    y: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.5, "p": 0.5}, BROADCAST, {"alpha": STEP, "p": [0.2, 0.5, 1.0]})
def proxskip(alpha: float = 0.3, p: float = 0.5, chi: float = 1.0) -> Method:
    """Decentralised ProxSkip: gradient steps with an exchange in random rounds.

    Args:
        alpha: step size.
        p: probability of an exchange in a round.
        chi: damping of the mixing, at least 1.

    Reference: Mishchenko, Malinovsky, Stich and Richtarik, ICML 2022.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.proxskip(0.5), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha)
    require_fraction("p", p, "(0, 1]")
    if require_number("chi", chi) < 1:
        raise CadenError(f"`chi` must be at least 1, got {chi}.")

    def init(x: Tensor, round: Round) -> State:
        return State(x, x * 0, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        x = z = awake(round, state.x - alpha * state.gradient - state.y, state.x)
        y = state.y
        if round.uniform("proxskip") < p:
            x = z - (z - round.broadcast(z).mix()) / (2 * chi)
            y = y + p * (z - x)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, y, value, gradient), Info(value, gradient)

    return Method(init, step, "proxskip")
