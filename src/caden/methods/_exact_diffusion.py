"""Exact diffusion: Yuan, Ying, Zhao and Sayed, "Exact diffusion for distributed optimization and learning", IEEE TSP
67(3), 2019; D2: Tang, Lian, Yan, Zhang and Liu, "D2: Decentralized training over decentralized data", ICML 2018; NIDS:
Li, Shi and Yan, "A decentralized proximal-gradient method with network independent step-sizes", IEEE TSP 67(17), 2019.

With Wt = (I + W)/2 and an explicit dual q that starts at 0:

    z <- x - alpha grad f(x) - q
    x <- Wt z
    q <- q + z - x

prox_diffusion is the proximal method of Alghunaim, Yuan and Sayed, "A linearly convergent proximal gradient algorithm
for decentralized optimization", NeurIPS 2019: the same with x <- prox(Wt z) and q <- q + z - Wt z, for the mean of the
f_i plus a regulariser that all share, here l1 |x|_1; l1 = 0 is exact diffusion.

Eliminating q gives x'' = Wt (2 x' - x - alpha (grad f(x') - grad f(x))). D2 and NIDS (with one common step) are the
same but for the first round, which does not mix. One vector per directed edge and round. Sleeping agents: W is doubly
stochastic on the awake subgraph, sum q = 0 in every round; exact.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import CadenError, number, positive
from caden.methods._first_order import awake, refresh


class State(NamedTuple):
    x: Tensor  # (k, d)
    q: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


def _method(alpha: float, name: str, mix_first: bool = True, l1: float = 0.0) -> Method:
    positive("alpha", alpha)

    def prox(z: Tensor) -> Tensor:
        return z.sign() * (z.abs() - alpha * l1).clamp(min=0) if l1 > 0 else z

    def init(x: Tensor, round: Round) -> State:
        return State(x, x * 0, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        z = awake(round, state.x - alpha * state.gradient - state.q, state.x)
        mixed = z if round.index == 0 and not mix_first else (z + round.broadcast(z).mix()) / 2
        x = awake(round, prox(mixed), state.x)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, state.q + z - mixed, value, gradient), Info(value, gradient)

    return Method(init, step, name)


def exact_diffusion(alpha: float = 0.3) -> Method:
    """Exact diffusion with step `alpha`."""
    return _method(alpha, "exact_diffusion")


def prox_diffusion(alpha: float = 0.3, l1: float = 1e-4) -> Method:
    """Proximal exact diffusion: mean of the f_i plus `l1` |x|_1."""
    if number("l1", l1) < 0:
        raise CadenError(f"`l1` must not be negative, got {l1}.")
    return _method(alpha, "prox_diffusion", l1=l1)


def d2(alpha: float = 0.3) -> Method:
    """D2: exact diffusion whose first round does not mix."""
    return _method(alpha, "d2", mix_first=False)


def nids(alpha: float = 0.3) -> Method:
    """NIDS with one step `alpha` for all agents; the same iterates as D2."""
    return _method(alpha, "nids", mix_first=False)
