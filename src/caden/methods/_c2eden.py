"""C2EDEN: Liu, Chen, Luo and Lui, "Communication efficient distributed Newton method with fast convergence rates", KDD
2023.

All agents have the same x. In round t each sends its gradient at x and one column, number t mod d, of its Hessian at
the snapshot u. After d rounds the server has a complete Hessian H of the mean of the f_i. It is used for the next d
rounds while another is filled at u = x:

    x <- x + argmin_s  g.s + s'H s / 2 + cubic/6 |s|^3          (cubic = 0: the Newton step)

In the first d rounds, x <- x - alpha g. A server method: two communications up and two down per agent and round (the
authors send the new x down instead, one communication). Two d x d matrices: small dimensions only.

Sleeping agents: refused; a column or gradient without some agent's part belongs to another function.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import CadenError, require_number, require_positive
from caden.methods._dense import must_be_awake, must_fit
from caden.methods._registry import STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d) equal rows
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)
    snapshot: Tensor  # (d,)
    columns: Tensor  # (d, d) being filled
    hessian: Tensor  # (d, d) of the last snapshot


def cubic_step(g: Tensor, H: Tensor, cubic: float) -> Tensor:
    """Return argmin g.s + s'H s/2 + cubic/6 |s|^3.

    It is s = -(H + cubic r/2 I)^-1 g with r = |s|, by bisection. If g is orthogonal to the lowest eigenvector of an
    indefinite H, s is a stationary point, not the minimiser.
    """
    step: Tensor
    if cubic == 0:
        step = -torch.linalg.pinv(H, hermitian=True) @ g  # the shortest step if H is singular
        return step
    values, basis = torch.linalg.eigh(H)
    coefficients = basis.mT @ g
    offsets = values - values[0]
    low = max(0.0, float(values[0]))  # bound of gap = values[0] + cubic r/2, accurate also if H is near singular
    high = low + cubic / 2 * (1 + float((2 * g.norm() / cubic).sqrt())) + abs(float(values[0]))
    for _ in range(200):
        gap = (low + high) / 2
        too_long = float((coefficients / (offsets + gap)).norm()) > 2 / cubic * (gap - float(values[0]))
        low, high = (gap, high) if too_long else (low, gap)
    step = -basis @ (coefficients / (offsets + high))
    return step


@register({"alpha": 0.5}, space={"alpha": STEP, "cubic": [0.0, 0.1, 1.0]}, server=True)
def c2eden(alpha: float = 0.3, cubic: float = 0.0) -> Method:
    """C2EDEN: Newton steps with a Hessian sent column by column; for small d, needs everyone awake.

    Args:
        alpha: step size of the first d rounds, before there is a Hessian.
        cubic: weight of the cubic regularisation; 0 for plain Newton steps.

    Reference: Liu, Chen, Luo and Lui, KDD 2023.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.c2eden(0.3), problem, graph, rounds=20)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha)
    if require_number("cubic", cubic) < 0:
        raise CadenError(f"`cubic` must not be negative, got {cubic}.")

    def init(x: Tensor, round: Round) -> State:
        must_be_awake("c2eden", round)
        must_fit("c2eden", 2, x)
        x = round.average(x).expand_as(x).contiguous()
        empty = x.new_zeros(x.shape[1], x.shape[1])
        return State(x, *round.problem.value_and_grad(x), x[0], empty, empty)

    def step(state: State, round: Round) -> tuple[State, Info]:
        x, d = state.x, state.x.shape[1]
        column = round.index % d
        unit = torch.zeros_like(x)
        unit[:, column] = 1
        g = round.average(state.gradient)
        columns = state.columns.clone()
        columns[:, column] = round.average(round.problem.hvp(state.snapshot.expand_as(x).contiguous(), unit))
        move = -alpha * g if round.index < d else cubic_step(g, state.hessian, cubic)
        x = x + move
        value, gradient = round.problem.value_and_grad(x)
        full = column == d - 1
        snapshot = x[0] if full else state.snapshot
        hessian = (columns + columns.mT) / 2 if full else state.hessian
        return State(x, value, gradient, snapshot, columns, hessian), Info(value, gradient)

    return Method(init, step, "c2eden")
