"""DINO: Crane and Roosta, "DINO: Distributed Newton-type optimization method", ICML 2020.

All agents have the same x. With g the mean gradient and H_i the local Hessian,

    v = (H_i^2 + phi^2 I)^-1 H_i g
    p_i = -v                                            if v.g >= theta |g|^2, else
    p_i = -v - l w,  w = (H_i^2 + phi^2 I)^-1 g,  l = (theta |g|^2 - v.g) / (w.g)
    p = mean p_i;   x <- x + a p,  a = 1, 1/2, 1/4 ... until mean f falls by rho a |p.g|

p is a descent direction of the sum of any smooth f_i. The inverses use conjugate gradients on Hessian-vector products.
Where the change of f is within its rounding error, it is computed from the slopes at both ends, a p.(g + g')/2 (Hager
and Zhang's approximate condition, SIAM J. Optim. 16(1), 2005). Otherwise steps that increase f by less than the
rounding error would be accepted, and which ones would depend on the last bit. A server method: two communications up
and two down per agent and round, plus two scalars each way per trial step size and two more.

Sleeping agents: refused; the mean gradient and the descent test need everyone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_integer, require_positive
from caden.methods._dense import must_be_awake
from caden.methods._registry import register
from caden.solvers._newton import conjugate_gradients

_HALVINGS = 30


class State(NamedTuple):
    x: Tensor  # (k, d) equal rows
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"tolerance": 1e-12}, space={"theta": {"low": 1e-5, "high": 1e-2}, "phi": [1e-6, 1e-4, 1e-2]}, server=True)
def dino(
    theta: float = 1e-4, phi: float = 1e-6, rho: float = 1e-4, iterations: int = 50, tolerance: float = 1e-4
) -> Method:
    """DINO with its authors' constants; needs everyone awake.

    Args:
        theta: least descent along each agent's direction, in units of |g|^2.
        phi: regularisation of the squared Hessians.
        rho: least decrease in the line search, in units of the slope.
        iterations, tolerance: of the conjugate gradients.

    Reference: Crane and Roosta, ICML 2020.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.dino(tolerance=1e-12), problem, graph, rounds=60)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("theta", theta), require_positive("phi", phi), require_positive("rho", rho)
    require_integer("iterations", iterations, least=1), require_positive("tolerance", tolerance)

    def init(x: Tensor, round: Round) -> State:
        must_be_awake("dino", round)
        x = round.average(x).expand_as(x).contiguous()
        return State(x, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        x = state.x
        g = round.average(state.gradient).expand_as(x).contiguous()

        def hessian(v: Tensor) -> Tensor:
            return round.problem.hvp(x, v)

        def solve(right: Tensor) -> Tensor:
            return conjugate_gradients(lambda v: hessian(hessian(v)) + phi**2 * v, right, iterations, tolerance)

        v = solve(hessian(g))
        shortfall = theta * (g * g).sum(1) - (v * g).sum(1)  # (k,)
        if bool((shortfall > 0).any()):
            w = solve(g)
            v = v + torch.where(shortfall > 0, shortfall / (w * g).sum(1), 0).unsqueeze(1) * w
        p = round.average(-v)

        def mean_value_and_slope(value: Tensor, gradient: Tensor) -> tuple[float, float]:
            """Return the mean value and its slope along p."""
            mean_value, slope = round.average(torch.stack([value, gradient @ p], dim=1)).tolist()
            return mean_value, slope

        (before, slope), length = mean_value_and_slope(state.value, state.gradient), 1.0
        rounding = 10 * torch.finfo(x.dtype).eps * abs(before)
        for _ in range(_HALVINGS):
            value, gradient = round.problem.value_and_grad(x + length * p)
            after, slope_after = mean_value_and_slope(value, gradient)
            change = after - before
            if abs(change) <= rounding:
                change = length * (slope + slope_after) / 2
            if change <= length * rho * slope:
                return State(x + length * p, value, gradient), Info(value, gradient)
            length /= 2
        return state, Info(state.value, state.gradient)

    return Method(init, step, "dino")
