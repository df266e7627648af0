"""Decentralised gradient descent: Nedic and Ozdaglar, "Distributed subgradient methods for multi-agent optimization",
IEEE TAC 54(1), 2009.

    x <- W x - alpha grad f(x)

One vector per directed edge and round. With a constant step it converges to a point near the minimiser, not to it:
biased, also when everyone is awake. Sleeping agents: W is doubly stochastic on the awake subgraph.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import positive
from caden.methods._first_order import refresh


class State(NamedTuple):
    x: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


def dgd(alpha: float = 0.3) -> Method:
    """Decentralised gradient descent with step `alpha` (biased)."""
    positive("alpha", alpha)

    def init(x: Tensor, round: Round) -> State:
        return State(x, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        x = round.broadcast(state.x).mix() - alpha * state.gradient * round.active
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, value, gradient), Info(value, gradient)

    return Method(init, step, "dgd")
