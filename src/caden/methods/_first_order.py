"""Gradient steps that methods share; only awake agents are evaluated."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from caden._tensor.parallel import AGENT_LOOPS
from caden._tensor.rows import rows_separately, rows_where, take_rows
from caden.core import LocalSolver, Round, Solved
from caden.errors import CadenError


def refresh(round: Round, x: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Evaluate f_i and its gradient at x for awake agents; the others have not moved and keep the old ones."""
    if round.everyone or bool(round.active.all()):
        return round.problem.value_and_grad(x)
    rows = round.active.squeeze(1).nonzero().flatten()
    new_value, new_gradient = round.problem.value_and_grad(x[rows], rows)
    return value.index_copy(0, rows, new_value), gradient.index_copy(0, rows, new_gradient)


def local_descent(round: Round, x: Tensor, step: float, correction: Tensor) -> Tensor:
    """Take `work[i]` steps v <- v - step (grad f_i(v) + correction_i) from x; agents without work stay.

    Mini-batches are drawn anew for every step.
    """
    require_fixed_steps(round)
    agent_loop = AGENT_LOOPS["loop"] if rows_separately() else AGENT_LOOPS.get(round.problem.execution)
    if agent_loop is not None:
        return _one_by_one(agent_loop, round, x, step, correction)
    if (end := round.problem.descend(x, step, correction, round.work)) is not None:
        return end
    v, everyone_works = x, int(round.work.min())
    for done in range(int(round.work.max())):
        rows = None if done < everyone_works else rows_where(round.work > done)
        functions = round.problem.redraw(done) if done else round.problem
        direction = functions.value_and_grad(take_rows(v, rows), rows)[1] + take_rows(correction, rows)
        v = v.sub(direction, alpha=step) if rows is None else v.index_add(0, rows, direction, alpha=-step)
    return v


def require_fixed_steps(round: Round) -> None:
    """Refuse local solves that stop by themselves: agents with unequal numbers of steps pull the mean to their side."""
    if round.accuracy is not None:
        raise CadenError(
            '`local_steps = "auto"` needs a method with a local solver, such as `caden`: unequal numbers of steps bias '
            "this one."
        )


def train(round: Round, solver: LocalSolver, x: Tensor, memory: Any, elsewhere: bool = True) -> Solved:
    """Take `work[i]` steps of a solver on f_i alone, from x; `elsewhere`: its last solve did not end there."""
    require_fixed_steps(round)
    return solver.solve(round.objective(0 * x, 0 * round.degree, elsewhere=elsewhere), x, round.work, memory)


def _one_by_one(agent_loop: Callable[..., None], round: Round, x: Tensor, step: float, correction: Tensor) -> Tensor:
    """Take all steps of an agent before those of the next one: its data stay in the cache."""
    new, work = x.clone(), round.work.tolist()

    def descend(i: int) -> None:
        v, row = x[i : i + 1], torch.tensor([i], device=x.device)
        for done in range(work[i]):
            functions = round.problem.redraw(done) if done else round.problem
            v = v - step * (functions.value_and_grad(v, row)[1] + correction[i])
        new[i] = v[0]

    agent_loop(descend, [i for i, steps in enumerate(work) if steps > 0])
    return new


def awake(round: Round, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` for awake agents and `old` for sleeping ones."""
    return new if round.everyone and new.shape == old.shape else torch.where(round.active, new, old)


def only_awake(round: Round, change: Tensor) -> Tensor:
    """Return the change of awake agents, and 0 for sleeping ones."""
    return change if round.everyone else change * round.active
