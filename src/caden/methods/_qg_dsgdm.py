"""QG-DSGDm: Lin, Karimireddy, Stich and Jaggi, "Quasi-global momentum: accelerating decentralized deep learning on
heterogeneous data", ICML 2021.

The momentum m follows the whole move of x, mixing included, and starts at 0:

    p = mu m + grad f(x)                 (nesterov: grad f(x) + mu p instead of p below)
    x' = W (x - alpha p)
    m <- (1 - nu) m + nu (x - x') / alpha;  x <- x'

One communication per directed edge and round. Biased, even with everyone awake: its limit is that of
x <- W (x - alpha grad f(x)), and with `nesterov` that of step (1 + mu) alpha.

Sleeping agents: W is doubly stochastic on the awake subgraph; a sleeper's momentum rests.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_fraction, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    m: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.05}, space={"alpha": STEP, "mu": [0.5, 0.9], "nesterov": [False, True]})
def qg_dsgdm(alpha: float = 0.3, mu: float = 0.9, nu: float = 0.1, nesterov: bool = False) -> Method:
    """Gossip SGD with quasi-global momentum; biased: it converges near the minimiser, not to it.

    Args:
        alpha: step size; smaller is less biased and slower.
        mu: momentum, in [0, 1).
        nu: weight of the newest move in the momentum, in (0, 1].
        nesterov: look ahead along the momentum.

    Reference: Lin, Karimireddy, Stich and Jaggi, ICML 2021.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.qg_dsgdm(0.02), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 0.3)
    True
    """
    require_positive("alpha", alpha)
    require_fraction("mu", mu, "[0, 1)")
    require_fraction("nu", nu, "(0, 1]")

    def init(x: Tensor, round: Round) -> State:
        return State(x, x * 0, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        p = mu * state.m + state.gradient
        direction = state.gradient + mu * p if nesterov else p
        x = round.broadcast(state.x - alpha * direction * round.active).mix()
        m = awake(round, (1 - nu) * state.m + nu / alpha * (state.x - x), state.m)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, m, value, gradient), Info(value, gradient)

    return Method(init, step, "qg_dsgdm")
