"""ESOM-K: Mokhtari, Shi, Ling and Ribeiro, "A decentralized second-order method with exact linear convergence rate for
consensus optimization", IEEE TSIPN 2(4), 2016; Network Newton NN-K: Mokhtari, Ling and Ribeiro, "Network Newton
distributed optimization methods", IEEE TSP 65(1), 2017.

Both split a Hessian into a block diagonal D and the rest, B, which couples neighbours, and expand the inverse in K
exchanges:

    d^0 = -D^-1 g,   d^(k+1) = D^-1 (B d^k - g),   x <- x + step d^K

ESOM:  g = grad f(x) + q + a (x - W x),  D = hess f + (eps + 2 a (1 - w_ii)) I,  B = a (I - 2 diag(W) + W),
       q <- q + a (x - W x) at the new x, starting at 0.
NN:    g = x - W x + a grad f(x),  D = a hess f + 2 (1 - w_ii) I,  B = I - 2 diag(W) + W: the gradient and Hessian of
       the penalty |x|^2_(I - W)/2 + a f(x), whose minimiser is near that of f, not at it: biased.

D^-1 uses conjugate gradients on Hessian-vector products. 1 + K communications per directed edge and round (the x that
ESOM sends for its dual is the one it needs next).

Sleeping agents: W is doubly stochastic on the awake subgraph. In our check ESOM stays exact with half of the agents
awake and diverges with a fifth; it was designed for everyone awake.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_integer, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import PENALTY, register
from caden.solvers._newton import conjugate_gradients, damped_hessian


class State(NamedTuple):
    x: Tensor  # (k, d)
    apart: Tensor  # (k, d) x - W x from the last exchange
    q: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


def _own_weight(round: Round, like: Tensor) -> Tensor:
    """Return the diagonal of W (k, 1): the weight that awake neighbours leave, known from the degrees."""
    return 1 - round.edges.sum(round.edges.mixing(like))


def _direction(
    round: Round, x: Tensor, g: Tensor, curvature: float, diagonal: Tensor, coupling: float, order: int
) -> Tensor:
    """Return the K-term expansion for D = curvature hess f + diagonal and B = coupling (I - 2 diag(W) + W)."""
    own = _own_weight(round, x)
    product = damped_hessian(round.problem, x, diagonal / curvature)

    def solve(right: Tensor) -> Tensor:
        return conjugate_gradients(product, right / curvature) * round.active

    d = solve(-g)
    for _ in range(order):
        d = solve(coupling * (d - 2 * own * d + round.broadcast(d).mix()) - g)
    return d


@register({"alpha": 1.0, "eps": 0.5}, "links compression", {"alpha": PENALTY, "eps": [0.3, 1.0, 3.0]})
def esom(alpha: float = 1.0, order: int = 0, eps: float = 1.0) -> Method:
    """ESOM-K: a second-order method of multipliers, for convex f_i.

    Args:
        alpha: penalty.
        order: terms K of the expansion; each needs an exchange.
        eps: proximal weight.

    Reference: Mokhtari, Shi, Ling and Ribeiro, IEEE TSIPN 2(4), 2016.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.esom(1.0, eps=0.5), problem, graph, rounds=400)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha), require_positive("eps", eps), require_integer("order", order)

    def init(x: Tensor, round: Round) -> State:
        return State(x, x - round.broadcast(x).mix(), x * 0, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        g = state.gradient + state.q + alpha * state.apart
        diagonal = eps + 2 * alpha * (1 - _own_weight(round, state.x))
        x = state.x + _direction(round, state.x, g, 1.0, diagonal, alpha, order)
        apart = awake(round, x - round.broadcast(x).mix(), state.apart)
        value, gradient = refresh(round, x, state.value, state.gradient)
        q = awake(round, state.q + alpha * apart, state.q)
        return State(x, apart, q, value, gradient), Info(value, gradient)

    return Method(init, step, "esom")


class NewtonState(NamedTuple):
    x: Tensor  # (k, d)
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.1}, space={"alpha": {"low": 0.01, "high": 10.0}})
def network_newton(alpha: float = 0.1, order: int = 1, step_size: float = 1.0) -> Method:
    """Network Newton NN-K; biased, since it minimises a penalty function.

    Args:
        alpha: weight of f in the penalty function; smaller is less biased and slower.
        order: terms K of the expansion; each needs an exchange.
        step_size: step size along the Newton direction.

    Reference: Mokhtari, Ling and Ribeiro, IEEE TSP 65(1), 2017.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.network_newton(0.01), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 0.3)
    True
    """
    require_positive("alpha", alpha), require_positive("step_size", step_size), require_integer("order", order)

    def init(x: Tensor, round: Round) -> NewtonState:
        return NewtonState(x, *round.problem.value_and_grad(x))

    def step(state: NewtonState, round: Round) -> tuple[NewtonState, Info]:
        g = state.x - round.broadcast(state.x).mix() + alpha * state.gradient
        diagonal = 2 * (1 - _own_weight(round, state.x))
        x = state.x + step_size * _direction(round, state.x, g, alpha, diagonal, 1.0, order)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return NewtonState(x, value, gradient), Info(value, gradient)

    return Method(init, step, "network_newton")
