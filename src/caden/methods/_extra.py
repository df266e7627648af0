"""EXTRA: Shi, Ling, Wu and Yin, "EXTRA: an exact first-order algorithm for decentralized consensus optimization", SIAM
J. Optim. 25(2), 2015.

In primal-dual form, with Wt = (I + W)/2, m = Wt x from the last exchange, and q that starts at (I - Wt) x:

    x <- m - alpha grad f(x) - q
    send x;  m <- Wt x
    q <- q + x - m

Eliminating q gives the two-step recursion x'' = (I + W) x' - Wt x - alpha (grad f(x') - grad f(x)). One communication
per directed edge and round.

Sleeping agents: W is doubly stochastic on the awake subgraph, sum q = 0 in every round; exact. The two-step recursion
itself would not be.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import BROADCAST, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    mixed: Tensor  # (k, d) m above
    q: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.5}, BROADCAST, {"alpha": STEP})
def extra(alpha: float = 0.3) -> Method:
    """EXTRA: exact first-order consensus optimisation.

    Args:
        alpha: step size.

    Reference: Shi, Ling, Wu and Yin, SIAM J. Optim. 25(2), 2015.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.extra(0.5), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha)

    def init(x: Tensor, round: Round) -> State:
        mixed = (x + round.broadcast(x).mix()) / 2
        return State(x, mixed, x - mixed, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        x = awake(round, state.mixed - alpha * state.gradient - state.q, state.x)
        mixed = awake(round, (x + round.broadcast(x).mix()) / 2, state.mixed)
        value, gradient = refresh(round, x, state.value, state.gradient)
        q = awake(round, state.q + x - mixed, state.q)
        return State(x, mixed, q, value, gradient), Info(value, gradient)

    return Method(init, step, "extra")
