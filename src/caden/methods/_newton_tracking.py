"""Newton tracking: Zhang, Ling and So, "A Newton tracking algorithm with exact linear convergence for decentralized
consensus optimization", IEEE TSIPN 7, 2021.

    u = (hess f(x) + eps I)^-1 r;   x' = x - u;   send x'
    r <- r + grad f(x') - grad f(x) + 2 a (x' - W x') - a (x - W x)

r starts at grad f(x) + a (x - W x). The inverse uses conjugate gradients on Hessian-vector products. One communication
per directed edge and one gradient per round.

Sleeping agents: refused; the terms of r that cancel in the sum over all agents would no longer cancel, and the limit
would be wrong.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_positive
from caden.methods._dense import must_be_awake
from caden.methods._registry import PENALTY, register
from caden.solvers._newton import conjugate_gradients, damped_hessian


class State(NamedTuple):
    x: Tensor  # (k, d)
    r: Tensor  # (k, d) right-hand side of the direction
    apart: Tensor  # (k, d) x - W x
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.5, "eps": 0.5}, "compression", {"alpha": PENALTY, "eps": [0.3, 1.0, 3.0]})
def newton_tracking(alpha: float = 1.0, eps: float = 1.0) -> Method:
    """Newton tracking, for convex f_i; needs everyone awake.

    Args:
        alpha: penalty.
        eps: proximal weight.

    Reference: Zhang, Ling and So, IEEE TSIPN 7, 2021.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.newton_tracking(0.5, 0.5), problem, graph, rounds=400)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha), require_positive("eps", eps)

    def init(x: Tensor, round: Round) -> State:
        must_be_awake("newton_tracking", round)
        apart = x - round.broadcast(x).mix()
        value, gradient = round.problem.value_and_grad(x)
        return State(x, gradient + alpha * apart, apart, value, gradient)

    def step(state: State, round: Round) -> tuple[State, Info]:
        x = state.x - conjugate_gradients(damped_hessian(round.problem, state.x, eps), state.r)
        apart = x - round.broadcast(x).mix()
        value, gradient = round.problem.value_and_grad(x)
        r = state.r + gradient - state.gradient + alpha * (2 * apart - state.apart)
        return State(x, r, apart, value, gradient), Info(value, gradient)

    return Method(init, step, "newton_tracking")
