"""Exact diffusion: Yuan, Ying, Zhao and Sayed, "Exact diffusion for distributed optimization and learning", IEEE TSP
67(3), 2019; D2: Tang, Lian, Yan, Zhang and Liu, "D2: Decentralized training over decentralized data", ICML 2018; NIDS:
Li, Shi and Yan, "A decentralized proximal-gradient method with network independent step-sizes", IEEE TSP 67(17), 2019.

With Wt = (I + W)/2 and an explicit dual q that starts at 0:

    z <- x - alpha grad f(x) - q
    x <- Wt z
    q <- q + z - x

prox_diffusion is the proximal method of Alghunaim, Yuan and Sayed, "A linearly convergent proximal gradient algorithm
for decentralized optimization", NeurIPS 2019. It has x <- prox(Wt z) and q <- q + z - Wt z, for the mean of the f_i
plus a regulariser that all agents share, here l1 |x|_1. With l1 = 0 it is exact diffusion.

Eliminating q gives x'' = Wt (2 x' - x - alpha (grad f(x') - grad f(x))). D2 and NIDS (with one common step size) differ
only in the first round, which does not mix. One communication per directed edge and round.

Sleeping agents: W is doubly stochastic on the awake subgraph, sum q = 0 in every round; exact.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import CadenError, require_number, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import BROADCAST, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    q: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


def _method(alpha: float, name: str, mix_first: bool = True, l1: float = 0.0) -> Method:
    require_positive("alpha", alpha)

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


@register({"alpha": 0.5}, BROADCAST, {"alpha": STEP})
def exact_diffusion(alpha: float = 0.3) -> Method:
    """Exact diffusion, with an explicit dual.

    Args:
        alpha: step size.

    Reference: Yuan, Ying, Zhao and Sayed, IEEE TSP 67(3), 2019.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.exact_diffusion(0.5), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    return _method(alpha, "exact_diffusion")


@register({"alpha": 0.5, "l1": 0.0}, BROADCAST, {"alpha": STEP})
def prox_diffusion(alpha: float = 0.3, l1: float = 1e-4) -> Method:
    """Proximal exact diffusion, for the mean of the f_i plus l1 |x|_1.

    Args:
        alpha: step size.
        l1: weight of |x|_1; 0 gives exact diffusion.

    Reference: Alghunaim, Yuan and Sayed, NeurIPS 2019.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.prox_diffusion(0.5, l1=0.0), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    if require_number("l1", l1) < 0:
        raise CadenError(f"`l1` must not be negative, got {l1}.")
    return _method(alpha, "prox_diffusion", l1=l1)


@register({"alpha": 0.5}, BROADCAST, {"alpha": STEP})
def d2(alpha: float = 0.3) -> Method:
    """D2: exact diffusion whose first round does not mix.

    Args:
        alpha: step size.

    Reference: Tang, Lian, Yan, Zhang and Liu, ICML 2018.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.d2(0.5), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    return _method(alpha, "d2", mix_first=False)


@register({"alpha": 0.5}, BROADCAST, {"alpha": STEP})
def nids(alpha: float = 0.3) -> Method:
    """NIDS with one step size for all agents; the same iterates as D2.

    Args:
        alpha: step size.

    Reference: Li, Shi and Yan, IEEE TSP 67(17), 2019.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.nids(0.5), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    return _method(alpha, "nids", mix_first=False)
