"""GT-Adam: Carnevale, Farina, Notarstefano and Notarstefano, "GTAdam: gradient tracking with adaptive momentum for
distributed online optimization", IEEE TCNS 10(3), 2023.

The tracker s starts at the gradients, m and v at 0; D is the change of the gradients:

    m <- beta1 m + (1 - beta1) s
    v <- min(beta2 v + (1 - beta2) s^2, ceiling)     entry by entry
    x <- W x - alpha m / sqrt(v + eps)
    s <- W s + D

Two communications per directed edge and round. Near the minimiser v decays, so the step grows to alpha / sqrt(eps):
with alpha L / sqrt(eps) well above 1, the run leaves the minimiser again.

Sleeping agents: W is doubly stochastic on the awake subgraph, so sum s = sum grad f holds in every round; exact.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_fraction, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import BROADCAST, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    tracker: Tensor  # (k, d) s above
    m: Tensor  # (k, d)
    v: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register(
    {"alpha": 0.02, "eps": 0.01, "beta2": 0.99},
    BROADCAST,
    {"alpha": {"low": 1e-4, "high": 0.1}, "eps": [1e-8, 1e-6, 1e-4], "beta2": [0.9, 0.99, 0.999]},
)
def gt_adam(
    alpha: float = 0.01, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, ceiling: float = 1e6
) -> Method:
    """GT-Adam: Adam along tracked gradients, without bias correction.

    Args:
        alpha: step size, in units of x; keep alpha L / sqrt(eps) below 1 for convergence to the minimiser.
        beta1, beta2: decay rates of the two moments, in [0, 1).
        eps: added to the second moment, under the root.
        ceiling: largest second moment.

    Reference: Carnevale, Farina, Notarstefano and Notarstefano, IEEE TCNS 10(3), 2023.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.gt_adam(0.02, eps=0.01), problem, graph, rounds=1500)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha), require_positive("eps", eps), require_positive("ceiling", ceiling)
    require_fraction("beta1", beta1, "[0, 1)"), require_fraction("beta2", beta2, "[0, 1)")

    def init(x: Tensor, round: Round) -> State:
        value, gradient = round.problem.value_and_grad(x)
        return State(x, gradient, x * 0, x * 0, value, gradient)

    def step(state: State, round: Round) -> tuple[State, Info]:
        s = state.tracker
        m = awake(round, beta1 * state.m + (1 - beta1) * s, state.m)
        v = awake(round, (beta2 * state.v + (1 - beta2) * s * s).clamp(max=ceiling), state.v)
        x = round.broadcast(state.x).mix() - alpha * m / (v + eps).sqrt() * round.active
        value, gradient = refresh(round, x, state.value, state.gradient)
        tracker = awake(round, round.broadcast(s).mix() + gradient - state.gradient, s)
        return State(x, tracker, m, v, value, gradient), Info(value, gradient)

    return Method(init, step, "gt_adam")
