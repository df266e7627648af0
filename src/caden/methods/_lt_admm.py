"""LT-ADMM and LT-ADMM-VR, local training in relaxed ADMM: Ren, Bastianello, Johansson and Parisini, "Communication-
efficient stochastic distributed learning", arXiv:2501.13516, 2025.

    v = x_i;  `local_steps` times  v <- v - gamma grad f_i(v) - beta (rho d_i x_i - sum_j z_ij)
    x_i <- v;  send z_ij - 2 rho x_i to j
    z_ij <- (1 - alpha) z_ij - alpha (the message from j)     if one arrives

LT-ADMM-VR takes, on a mini-batch B drawn for the step, grad f_B(v) - grad f_B(x_i) + grad f_i(x_i) instead of
grad f_i(v), so that steps near the minimiser are not noisy and mini-batches leave no error. This is SVRG's estimator
with x_i, where the round began, as its point of reference. The paper has SAGA's, with a table of one gradient per
sample, which problems without names for their samples cannot fill. A round costs a gradient on all samples, counted as
one, and two per step on batches. Where there are no batches, LT-ADMM-VR is LT-ADMM.

One communication per directed edge and round, a different one for each neighbour.

Sleeping agents: arcs without a message stay as they are, also when messages are lost; exact.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from caden._tensor.rows import rows_where, take_rows
from caden.core import Info, Method, Problem, Round
from caden.errors import require_fraction, require_positive
from caden.methods._first_order import local_descent
from caden.methods._registry import EVERYTHING, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    z: Tensor  # (2e, d) arcs


_UNIT = {"gamma": 0.2, "beta": 0.1, "rho": 0.4}
_SPACE = {"gamma": STEP, "beta": [0.02, 0.05, 0.1], "rho": [0.1, 0.3, 1.0]}


@register(_UNIT, EVERYTHING, _SPACE, free=True)
def lt_admm(gamma: float = 0.1, beta: float = 0.05, rho: float = 0.3, alpha: float = 0.5) -> Method:
    """LT-ADMM: relaxed ADMM with local gradient steps.

    Args:
        gamma: local step size.
        beta: step size of the dual part; beta rho d_max local_steps must be small.
        rho: penalty.
        alpha: relaxation, in (0, 1).

    Reference: Ren, Bastianello, Johansson and Parisini, arXiv:2501.13516, 2025.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.lt_admm(0.2, 0.1, 0.4), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    return _method("lt_admm", gamma, beta, rho, alpha, lambda round, x: round)


@register(_UNIT, EVERYTHING, _SPACE, free=True)
def lt_admm_vr(gamma: float = 0.1, beta: float = 0.05, rho: float = 0.3, alpha: float = 0.5) -> Method:
    """LT-ADMM with variance-reduced gradients of mini-batches.

    Args:
        gamma: local step size.
        beta: step size of the dual part; beta rho d_max local_steps must be small.
        rho: penalty.
        alpha: relaxation, in (0, 1).

    Reference: Ren, Bastianello, Johansson and Parisini, arXiv:2501.13516, 2025; Johnson and Zhang, NIPS 2013 (SVRG).

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.lt_admm_vr(0.2, 0.1, 0.4), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    return _method("lt_admm_vr", gamma, beta, rho, alpha, _reduced)


class _Reduced(Problem):
    """The functions of a step with the mean of their gradients at `x` made exact: those at `x` have no noise."""

    def __init__(self, drawn: Problem, x: Tensor, gradient: Tensor):
        self._drawn, self._x, self._gradient = drawn, x, gradient
        self.execution = drawn.execution

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, gradient = self._drawn.value_and_grad(x, rows)
        there = self._drawn.value_and_grad(take_rows(self._x, rows), rows)[1]
        return value, gradient - there + take_rows(self._gradient, rows)

    def redraw(self, step: int) -> "_Reduced":
        return _Reduced(self._drawn.redraw(step), self._x, self._gradient)


def _reduced(round: Round, x: Tensor) -> Round:
    """Return the round with variance-reduced functions around x."""
    if not round.problem.stochastic:
        return round
    rows = rows_where(round.work > 0)
    gradient = round.problem.exact.value_and_grad(take_rows(x, rows), rows)[1]
    known = gradient if rows is None else torch.zeros_like(x).index_copy(0, rows, gradient)
    return round._replace(problem=_Reduced(round.problem, x, known))


def _method(
    name: str, gamma: float, beta: float, rho: float, alpha: float, prepare: Callable[[Round, Tensor], Round]
) -> Method:
    require_positive("gamma", gamma), require_positive("beta", beta), require_positive("rho", rho)
    require_fraction("alpha", alpha)

    def init(x: Tensor, round: Round) -> State:
        first, second = round.broadcast(x).ends()
        z = rho / 2 * (first + second)
        return State(x, torch.cat([z, z]))

    def step(state: State, round: Round) -> tuple[State, Info]:
        owner = round.edges.owner()
        pull = round.edges.arc_sum((rho * state.x).index_select(0, owner).sub_(state.z))
        x = local_descent(prepare(round, state.x), state.x, gamma, beta / gamma * pull)
        received, arrived = round.exchange(state.z - (2 * rho * x).index_select(0, owner))
        return State(x, torch.where(arrived, ((1 - alpha) * state.z).sub_(alpha * received), state.z)), Info()

    return Method(init, step, name)
