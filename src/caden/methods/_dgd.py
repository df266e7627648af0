"""Decentralised gradient descent: Nedic and Ozdaglar, "Distributed subgradient methods for multi-agent optimization",
IEEE TAC 54(1), 2009.

    x <- W x - alpha grad f(x)

One communication per directed edge and round. Biased, even with everyone awake: with a constant step size it converges
to a point near the minimiser, not to it.

Sleeping agents: W is doubly stochastic on the awake subgraph.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_positive
from caden.methods._first_order import only_awake, refresh
from caden.methods._registry import STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.1}, space={"alpha": STEP})
def dgd(alpha: float = 0.3) -> Method:
    """Decentralised gradient descent; biased: it converges near the minimiser, not to it.

    Args:
        alpha: step size; smaller is less biased and slower.

    Reference: Nedic and Ozdaglar, IEEE TAC 54(1), 2009.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.dgd(0.02), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 0.3)
    True
    """
    require_positive("alpha", alpha)

    def init(x: Tensor, round: Round) -> State:
        return State(x, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        x = round.broadcast(state.x).mix() - only_awake(round, alpha * state.gradient)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, value, gradient), Info(value, gradient)

    return Method(init, step, "dgd")
