"""LED, local exact diffusion: Alghunaim, "Local exact-diffusion for decentralized optimization and learning", IEEE TAC,
2024.

    v = x;  `local_steps` times  v <- v - alpha grad f(v) - beta y
    send v;  x <- Wt v,  Wt = (I + W)/2, or W as published (`lazy = False`)
    y <- y + v - x

One communication per directed edge and round. One local step with beta = 1 is exact diffusion.

Sleeping agents: W is doubly stochastic on the awake subgraph, sum y = 0 in every round; exact.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_positive
from caden.methods._first_order import local_descent
from caden.methods._registry import BROADCAST, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    y: Tensor  # (k, d)


@register({"alpha": 0.3, "beta": 0.3}, BROADCAST, {"alpha": STEP, "beta": [0.1, 0.2, 0.5], "lazy": [True, False]})
def led(alpha: float = 0.1, beta: float = 0.2, lazy: bool = True) -> Method:
    """LED: exact diffusion with local steps.

    Args:
        alpha: local step size.
        beta: dual step, about 1 / local_steps.
        lazy: mix with (I + W)/2, which allows longer steps, instead of W.

    Reference: Alghunaim, IEEE TAC, 2024.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.led(0.3, 0.2), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha), require_positive("beta", beta)

    def init(x: Tensor, round: Round) -> State:
        return State(x, x * 0)

    def step(state: State, round: Round) -> tuple[State, Info]:
        v = local_descent(round, state.x, alpha, beta / alpha * state.y)
        x = round.broadcast(v).mix()
        x = (v + x) / 2 if lazy else x
        return State(x, state.y + v - x), Info()

    return Method(init, step, "led")
