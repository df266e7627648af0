"""Tracked momentum of unit length. GT-NSGDm: Yu, Jakovetic and Kar, "Decentralized nonconvex optimization under
heavy-tailed noise: normalization and optimal convergence", ICLR 2026. DeMuon: He, Ren, Mao and Larsson, "DeMuon: a
decentralized Muon for matrix optimization over graphs", arXiv:2510.01377, 2025.

Momentum v and tracker y start at 0:

    v' = beta v + (1 - beta) grad f(x)
    y <- W (y + v' - v);  v <- v'
    x <- W (x - alpha N(y))

GT-NSGDm: N(y) = y / |y|. DeMuon: N(y) = U V' of each weight matrix y = U S V', by five Newton-Schulz steps, which leave
singular values between 0.68 and 1.13; kernels are matrices with a row per output channel, and vectors, single rows and
single columns are divided by their norm. The shapes are those of the problem's model; a problem without a model is one
vector, for which DeMuon is GT-NSGDm.

Two communications per directed edge and round. Biased: steps do not shrink near a minimiser, so the iterates stop
within O(alpha) of it; with a schedule that falls to 0, within that of its last steps.

Sleeping agents: W is doubly stochastic on the awake subgraph, so sum y = sum v holds in every round.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from caden._tensor.rows import rows_separately
from caden.core import Info, Method, Problem, Round
from caden.errors import require_choice, require_fraction, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import register
from caden.solvers._torch_optim import SCHEDULES

_NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # Muon's coefficients


class State(NamedTuple):
    x: Tensor  # (k, d)
    tracker: Tensor  # (k, d) y above
    momentum: Tensor  # (k, d) v above
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


_SPACE = {"alpha": {"low": 1e-3, "high": 1.0}, "beta": [0.0, 0.5, 0.8], "schedule": ["constant", "linear"]}


@register({"alpha": 0.01}, space=_SPACE)
def gt_nsgdm(alpha: float = 0.1, beta: float = 0.8, schedule: str = "constant") -> Method:
    """Gradient tracking along normalised momentum; biased: it stops within O(alpha) of the minimiser.

    Args:
        alpha: length of a step, in units of x.
        beta: momentum, in [0, 1).
        schedule: factor of `alpha` over the run: "constant", "linear" or "cosine" (both fall to 0).

    Reference: Yu, Jakovetic and Kar, ICLR 2026.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.gt_nsgdm(0.1, schedule="linear"), problem, graph, rounds=400)
    >>> bool((result.mean - problem.solution).norm() < 0.01)
    True
    """
    return _method("gt_nsgdm", alpha, beta, schedule, lambda y, problem: _unit(y.unsqueeze(2)).squeeze(2))


@register({"alpha": 0.01}, space=_SPACE)
def demuon(alpha: float = 0.02, beta: float = 0.8, schedule: str = "constant") -> Method:
    """DeMuon: gradient tracking along orthogonalised momentum; biased: it stops within O(alpha) of the minimiser.

    Args:
        alpha: length of a step in every singular direction, in units of x.
        beta: momentum, in [0, 1).
        schedule: factor of `alpha` over the run: "constant", "linear" or "cosine" (both fall to 0).

    Reference: He, Ren, Mao and Larsson, arXiv:2510.01377, 2025.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.demuon(0.1, schedule="linear"), problem, graph, rounds=400)
    >>> bool((result.mean - problem.solution).norm() < 0.01)
    True
    """
    return _method("demuon", alpha, beta, schedule, orthogonal)


def _method(
    name: str, alpha: float, beta: float, schedule: str, normalise: Callable[[Tensor, Problem], Tensor]
) -> Method:
    require_positive("alpha", alpha), require_choice("schedule", schedule, SCHEDULES)
    require_fraction("beta", beta, "[0, 1)")

    def init(x: Tensor, round: Round) -> State:
        return State(x, x * 0, x * 0, *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        v = awake(round, beta * state.momentum + (1 - beta) * state.gradient, state.momentum)
        y = awake(round, round.broadcast(state.tracker + v - state.momentum).mix(), state.tracker)
        length = alpha * SCHEDULES[schedule](round.elapsed)
        x = round.broadcast(state.x - length * normalise(y, round.problem) * round.active).mix()
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, y, v, value, gradient), Info(value, gradient)

    return Method(init, step, name)


def orthogonal(rows: Tensor, problem: Problem) -> Tensor:
    """Return the rows (k, d) with each weight matrix in them replaced by a nearly orthogonal one."""
    shapes = problem.shapes or [torch.Size([problem.dim])]
    parts = []
    for part, shape in zip(torch.split(rows, [s.numel() for s in shapes], dim=1), shapes):
        is_matrix = len(shape) >= 2 and 1 < shape[0] < shape.numel()
        matrices = part.reshape(len(rows), shape[0] if is_matrix else 1, -1)
        parts.append((_newton_schulz(matrices) if is_matrix else _unit(matrices)).flatten(1))
    return torch.cat(parts, dim=1)


def _unit(matrices: Tensor) -> Tensor:
    """Return each of (k, n, p) divided by its Frobenius norm; zeros stay zero."""
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return matrices / norms.clamp(min=torch.finfo(norms.dtype).tiny)


def _newton_schulz(matrices: Tensor) -> Tensor:
    """Return U V' of each of (k, n, p), nearly."""
    if rows_separately() and len(matrices) > 1:  # a row's bits must not depend on the others
        return torch.cat([_newton_schulz(one) for one in torch.split(matrices, 1)])
    if matrices.shape[1] > matrices.shape[2]:
        return _newton_schulz(matrices.mT).mT
    X, (a, b, c) = _unit(matrices), _NEWTON_SCHULZ
    for _ in range(5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X
