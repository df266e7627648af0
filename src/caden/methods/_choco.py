"""Gossip of compressed differences. CHOCO-SGD: Koloskova, Stich and Jaggi, "Decentralized stochastic optimization and
gossip algorithms with compressed communication", ICML 2019. BEER: Zhao, Li, Li, Richtarik and Chi, "BEER: fast O(1/T)
rate for decentralized nonconvex optimization with communication compression", NeurIPS 2022.

xh, h and g are what all neighbours know of a row: the sum of the compressed differences C(row - known) sent so far.

    CHOCO-SGD   x' = x - alpha grad f(x);  xh <- xh + C(x' - xh);  x <- x' + gamma (W xh - xh)
    BEER        h <- h + C(x - h);  x <- x + gamma (W h - h) - alpha v
                g <- g + C(v - g);  v <- v + gamma (W g - g) + D      D the change of the gradients; v starts at them

The compressor is that of the run, and the network keeps xh, h and g and counts the bytes of C as they are packed:
`messages = {"top": 0.1}` or `{"bits": 4}`. Without it, C is the identity. The first message of each kind is sent whole
(in the papers, xh, h and g start at 0). One communication per directed edge and round for CHOCO-SGD, two for BEER.

With C = identity and gamma = 1, CHOCO-SGD is x <- W (x - alpha grad f(x)), and BEER is DIGing. CHOCO-SGD is biased for
every alpha > 0, more so under compression; BEER is exact.

Sleeping agents: W is doubly stochastic on the awake subgraph, and neighbours keep what they know of a sleeper, so
sum v = sum grad f holds in every round.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_fraction, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._gossip import damped_mix
from caden.methods._registry import BROADCAST, STEP, register

_SPACE = {"alpha": STEP, "gamma": [0.1, 0.3, 0.9]}


class ChocoState(NamedTuple):
    x: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


class BeerState(NamedTuple):
    x: Tensor  # (k, d)
    tracker: Tensor  # (k, d) v above
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


def _require(alpha: float, gamma: float) -> None:
    require_positive("alpha", alpha)
    require_fraction("gamma", gamma, "(0, 1]")


@register({"alpha": 0.1, "gamma": 0.5}, space=_SPACE)
def choco(alpha: float = 0.3, gamma: float = 0.5) -> Method:
    """CHOCO-SGD: gossip of compressed differences after a gradient step; biased.

    Args:
        alpha: step size; smaller is less biased and slower.
        gamma: consensus step size, in (0, 1]; smaller for stronger compression.

    Reference: Koloskova, Stich and Jaggi, ICML 2019.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> method, messages = caden.methods.choco(0.02, 0.5), {"top": 0.5}
    >>> result = caden.simulate(method, problem, graph, rounds=400, messages=messages)
    >>> bool((result.mean - problem.solution).norm() < 0.3)
    True
    """
    _require(alpha, gamma)

    def init(x: Tensor, round: Round) -> ChocoState:
        return ChocoState(x, *round.problem.value_and_grad(x))

    def step(state: ChocoState, round: Round) -> tuple[ChocoState, Info]:
        x = damped_mix(round, state.x - alpha * state.gradient * round.active, gamma)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return ChocoState(x, value, gradient), Info(value, gradient)

    return Method(init, step, "choco")


@register({"alpha": 0.1, "gamma": 0.5}, BROADCAST, _SPACE)
def beer(alpha: float = 0.3, gamma: float = 0.5) -> Method:
    """BEER: gradient tracking by gossip of compressed differences.

    Args:
        alpha: step size.
        gamma: consensus step size, in (0, 1]; smaller for stronger compression.

    Reference: Zhao, Li, Li, Richtarik and Chi, NeurIPS 2022.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> method, messages = caden.methods.beer(0.2, 0.5), {"top": 0.5}
    >>> result = caden.simulate(method, problem, graph, rounds=500, messages=messages)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    _require(alpha, gamma)

    def init(x: Tensor, round: Round) -> BeerState:
        value, gradient = round.problem.value_and_grad(x)
        return BeerState(x, gradient, value, gradient)

    def step(state: BeerState, round: Round) -> tuple[BeerState, Info]:
        x = damped_mix(round, state.x, gamma) - alpha * state.tracker * round.active
        value, gradient = refresh(round, x, state.value, state.gradient)
        tracker = damped_mix(round, state.tracker, gamma) + gradient - state.gradient
        return BeerState(x, awake(round, tracker, state.tracker), value, gradient), Info(value, gradient)

    return Method(init, step, "beer")
