"""Exact diffusion: Yuan, Ying, Zhao and Sayed, "Exact diffusion for distributed optimization and learning", IEEE TSP
67(3), 2019; D2: Tang, Lian, Yan, Zhang and Liu, "D2: Decentralized training over decentralized data", ICML 2018; NIDS:
Li, Shi and Yan, "A decentralized proximal-gradient method with network independent step-sizes", IEEE TSP 67(17), 2019.

With Wt = (I + W)/2 and an explicit dual q that starts at 0:

    z <- x - alpha grad f(x) - q
    x <- Wt z
    q <- q + z - x

Eliminating q gives x'' = Wt (2 x' - x - alpha (grad f(x') - grad f(x))). D2 and NIDS (with one common step) are the
same but for the first round, which does not mix. One vector per directed edge and round. Sleeping agents: W is doubly
stochastic on the awake subgraph, sum q = 0 in every round; exact.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import positive
from caden.methods._first_order import awake, refresh


class State(NamedTuple):
    x: Tensor  # (k, d)
    q: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


def _method(alpha: float, name: str, mix_first: bool) -> Method:
    positive("alpha", alpha)

    def init(x: Tensor, round: Round) -> State:
        return State(x, x * 0, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        z = awake(round, state.x - alpha * state.gradient - state.q, state.x)
        x = z if round.index == 0 and not mix_first else (z + round.broadcast(z).mix()) / 2
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, state.q + z - x, value, gradient), Info(value, gradient)

    return Method(init, step, name)


def exact_diffusion(alpha: float = 0.3) -> Method:
    """Exact diffusion with step `alpha`."""
    return _method(alpha, "exact_diffusion", mix_first=True)


def d2(alpha: float = 0.3) -> Method:
    """D2: exact diffusion whose first round does not mix."""
    return _method(alpha, "d2", mix_first=False)


def nids(alpha: float = 0.3) -> Method:
    """NIDS with one step `alpha` for all agents; the same iterates as D2."""
    return _method(alpha, "nids", mix_first=False)
