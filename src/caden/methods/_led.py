"""LED, local exact diffusion: Alghunaim, "Local exact-diffusion for decentralized optimization and learning", IEEE TAC,
2024.

    v = x;  `local_steps` times  v <- v - alpha grad f(v) - beta y
    send v;  x <- Wt v,  Wt = (I + W)/2
    y <- y + v - x

One vector per directed edge and round; one local step with beta = 1 is exact diffusion. Sleeping agents: W is doubly
stochastic on the awake subgraph, sum y = 0 in every round; exact.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import positive
from caden.methods._first_order import local_descent


class State(NamedTuple):
    x: Tensor  # (k, d)
    y: Tensor  # (k, d)


def led(alpha: float = 0.1, beta: float = 0.2) -> Method:
    """LED with local step `alpha`; `beta` is about 1 / local_steps."""
    positive("alpha", alpha), positive("beta", beta)

    def init(x: Tensor, round: Round) -> State:
        return State(x, x * 0)

    def step(state: State, round: Round) -> tuple[State, Info]:
        v = local_descent(round, state.x, alpha, beta / alpha * state.y)
        x = (v + round.broadcast(v).mix()) / 2
        return State(x, state.y + v - x), Info()

    return Method(init, step, "led")
