"""What the methods that take plain gradient steps share: evaluating awake agents only."""

from __future__ import annotations

import torch
from torch import Tensor

from caden.core import Round


def refresh(round: Round, x: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """f_i and its gradient at x for the awake agents; sleepers, who have not moved, keep what they know."""
    if bool(round.active.all()):
        return round.problem.value_and_grad(x)
    rows = round.active.squeeze(1).nonzero().flatten()
    new_value, new_gradient = round.problem.value_and_grad(x[rows], rows)
    return value.index_copy(0, rows, new_value), gradient.index_copy(0, rows, new_gradient)


def local_descent(round: Round, x: Tensor, step: float, correction: Tensor) -> Tensor:
    """`work[i]` steps v <- v - step (grad f_i(v) + correction_i) from x; agents with no work stay."""
    v = x.clone()
    for iteration in range(int(round.work.max())):
        rows = (round.work > iteration).nonzero().flatten()
        gradient = round.problem.value_and_grad(v[rows], rows)[1]
        v[rows] -= step * (gradient + correction[rows])
    return v


def awake(round: Round, new: Tensor, old: Tensor) -> Tensor:
    """`new` at awake agents, `old` at sleepers."""
    return torch.where(round.active, new, old)
