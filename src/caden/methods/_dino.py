"""DINO: Crane and Roosta, "DINO: Distributed Newton-type optimization method", ICML 2020.

Every agent holds the same x; g is the mean gradient and H_i the local Hessian:

    v = (H_i^2 + phi^2 I)^-1 H_i g
    p_i = -v                                            if v.g >= theta |g|^2, else
    p_i = -v - l w,  w = (H_i^2 + phi^2 I)^-1 g,  l = (theta |g|^2 - v.g) / (w.g)
    p = mean p_i;   x <- x + a p,  a = 1, 1/2, 1/4 ... until mean f falls by rho a |p.g|

so that p descends on the sum of any smooth f_i. The inverses by conjugate gradients on Hessian-vector products. A
server method: two vectors up and two down per agent and round, and a scalar each way per trial length and one more.

Sleeping agents: refused; the mean gradient and the descent test need everyone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import positive, whole
from caden.methods._dense import must_be_awake
from caden.solvers._newton import conjugate_gradients

_HALVINGS = 30


class State(NamedTuple):
    x: Tensor  # (k, d) equal rows
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


def dino(
    theta: float = 1e-4, phi: float = 1e-6, rho: float = 1e-4, iterations: int = 50, tolerance: float = 1e-4
) -> Method:
    """DINO with its authors' constants; at most `iterations` of conjugate gradients; needs everyone awake."""
    positive("theta", theta), positive("phi", phi), positive("rho", rho)
    whole("iterations", iterations, least=1), positive("tolerance", tolerance)

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
        lacking = theta * (g * g).sum(1) - (v * g).sum(1)  # (k,)
        if bool((lacking > 0).any()):
            w = solve(g)
            v = v + torch.where(lacking > 0, lacking / (w * g).sum(1), 0).unsqueeze(1) * w
        p = round.average(-v)

        slope, before, length = p @ g[0], round.average(state.value.unsqueeze(1)), 1.0
        slack = 10 * torch.finfo(x.dtype).eps * before.abs()  # below it, differences of f are rounding
        for _ in range(_HALVINGS):
            value, gradient = round.problem.value_and_grad(x + length * p)
            if bool(round.average(value.unsqueeze(1)) <= before + slack + length * rho * slope):
                return State(x + length * p, value, gradient), Info(value, gradient)
            length /= 2
        return state, Info(state.value, state.gradient)

    return Method(init, step, "dino")
