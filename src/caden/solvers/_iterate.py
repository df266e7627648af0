"""The current state of a batch of local solves, shared by the solvers.

With h_i(v) = f_i(v) + slope_i.(v - x_i) + rho_i/2 |v - x_i|^2 (`core.Objective`), moving from x to x + p changes the
slope of the proximal part by rho p. So grad h = gradient + slope always holds at the current point.

If f is drawn anew for every local step (`fresh`), the gradient is evaluated before the step, and is that of the step's
own draw; otherwise it is evaluated after the step, and is known when the next solve begins. Both take one gradient per
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from caden._tensor.rows import row_dots, row_norms, rows_where, take_rows
from caden.core import Info, Objective, Problem, Solved
from caden.errors import CadenError

FLOOR = 8  # in units of the rounding error of the two parts of grad h


def accurate(
    gradient: Tensor, slope: Tensor, way: Tensor, rho: Tensor, first: Tensor, accuracy: float, overshoot: float
) -> Tensor:
    """Return (k,) which agents may stop by the rule of `core.Objective`, or are at the rounding error.

    They have come a `way` (k, d) from the start, where the norm of grad h was `first` (k,).
    """
    g, length = gradient + slope, row_norms(way)
    norm, enough = row_norms(g), torch.where(rho > 0, rho * length, first) * accuracy
    floor = FLOOR * torch.finfo(g.dtype).eps * (row_norms(gradient) + row_norms(slope))
    beyond = row_dots(g, way) > overshoot * rho * length**2
    return (norm <= floor) | ((norm <= enough) & ~(beyond & (rho > 0)))


class Memory(NamedTuple):
    """What every solver stores between rounds."""

    value: Tensor  # (k,) f_i at x_i
    gradient: Tensor  # (k, d) its gradient
    curvature: Tensor  # (k,) largest |grad f_i(u) - grad f_i(v)| / |u - v| met so far; 0 if unknown


def start(problem: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
    """Evaluate f at x^0: the only gradient of a run besides those of its local steps.

    Mini-batches are drawn in every round, so there the first gradient is that of the first local step.
    """
    value, gradient = (x.new_zeros(len(x)), x * 0) if problem.stochastic else problem.value_and_grad(x)
    known = torch.zeros_like(value) if curvature is None else curvature.to(value)
    return Memory(value, gradient, known)


class Trial(NamedTuple):
    """The result of one evaluation at x + p."""

    point: Tensor  # (k', d)
    value: Tensor  # (k',) of f
    gradient: Tensor  # (k', d) of f
    gradient_change: Tensor  # (k', d) change of the gradient of f
    length: Tensor  # (k',) |p|
    change: Tensor  # (k',) h(x + p) - h(x); not a number if value or gradient is not finite
    curvature: Tensor  # (k',) |gradient_change| / |p|; 0 if that is not finite

    def select(self, mask: Tensor) -> Trial:
        """Return the rows where `mask` holds."""
        return Trial(*(part[mask] for part in self))


class Iterate:
    """The current point of each agent; methods act only on the given rows."""

    def __init__(self, objective: Objective, x: Tensor, memory: Memory, work: Tensor, fresh: bool = False):
        self.problem, self.rho = objective.problem, objective.rho
        self.work, self.steps = work, torch.zeros_like(work)
        self.x, self.slope = x.clone(), objective.slope.clone()
        self.value, self.gradient, self.curvature = (part.clone() for part in memory[:3])
        self._fresh, self._seen = fresh and self.problem.stochastic, torch.zeros_like(self.value)
        self._next = self.problem  # the functions of the next local step, if they are drawn anew
        if self.problem.stochastic or objective.elsewhere:  # the stored values belong to other samples, or points
            self._draw(rows_where(work > 0), self.problem)
        self._accuracy, self._overshoot = objective.accuracy, objective.overshoot
        self._start = None
        if self._accuracy is not None:
            if self._fresh:
                raise CadenError(
                    '`local_steps = "auto"` cannot see through the noise of mini-batches and dropout: set a number.'
                )
            self._start = (x, row_norms(self.gradient + objective.slope))

    def _draw(self, rows: Tensor | None, functions: Problem) -> None:
        """Evaluate functions at the current points."""
        value, gradient = functions.value_and_grad(take_rows(self.x, rows), rows)
        if rows is None:
            self.value, self.gradient = value, gradient
            self._seen += value
        else:
            self.value[rows], self.gradient[rows] = value, gradient
            self._seen[rows] += value

    def live(self, iteration: int) -> Tensor:
        """Return (k,) which agents take another step: they have work left and are not accurate enough."""
        live = self.work > iteration
        if self._start is None or self._accuracy is None or iteration == 0:
            return live
        start, first = self._start
        parts = self.gradient, self.slope, self.x - start, self.rho.squeeze(1), first
        return live & ~accurate(*parts, self._accuracy, self._overshoot)

    def local_steps(self) -> Iterator[tuple[int, Tensor | None]]:
        """Yield the number of each local step and the rows that take it (None for all of them)."""
        for iteration in range(int(self.work.max())):
            live = self.live(iteration)
            if not bool(live.any()):
                return
            rows = rows_where(live)
            if self._fresh and iteration > 0:
                self._draw(rows, self._next)
            if self._fresh and iteration + 1 < int(self.work.max()):
                self._next = self.problem.redraw(iteration + 1)
                self._next.prepare(rows_where(self.work > iteration + 1))
            yield iteration, rows

    def solved(self) -> Solved:
        """Return the result of a solver that stores no more than the common memory."""
        memory = Memory(self.value, self.gradient, self.curvature)
        return Solved(self.x, memory, self.info())

    def info(self) -> Info:
        """Return what to report of the solve."""
        if not self.problem.stochastic:
            return Info(self.value, self.gradient, steps=self.steps)
        evaluations = self.steps if self._fresh else (self.work > 0).to(self.work)
        seen = torch.where(evaluations > 0, self._seen / evaluations, torch.nan)
        return Info(steps=self.steps, seen=seen)

    def full_gradient(self, rows: Tensor | None) -> Tensor:
        """Return grad h at the current points."""
        return take_rows(self.gradient, rows) + take_rows(self.slope, rows)

    def safe_scale(self, rows: Tensor | None, g: Tensor) -> Tensor:
        """Return the (k', 1) step length 1 / (rho + L) along -g, with L the largest curvature known.

        While L is unknown, the step is no longer than x itself (or 1).
        """
        known = take_rows(self.curvature, rows).unsqueeze(1)
        scale = 1 / (take_rows(self.rho, rows) + known)
        if bool((known > 0).all()):
            return scale
        cap = (row_norms(take_rows(self.x, rows)).clamp(min=1) / row_norms(g)).unsqueeze(1)
        return torch.where(known > 0, scale, torch.minimum(scale, cap))

    def evaluate(self, rows: Tensor | None, p: Tensor) -> Trial:
        """Evaluate at x + p.

        The proximal part of the change is computed in closed form, so only the difference of f suffers cancellation.
        """
        point = take_rows(self.x, rows) + p
        value, gradient = self.problem.value_and_grad(point, rows)
        gradient_change, length = gradient - take_rows(self.gradient, rows), row_norms(p)
        distance = row_norms(gradient_change)
        change = value - take_rows(self.value, rows) + row_dots(take_rows(self.slope, rows), p)
        change += take_rows(self.rho, rows).squeeze(1) * length**2 / 2 + 0 * distance
        return Trial(point, value, gradient, gradient_change, length, change, (distance / length).nan_to_num(0, 0))

    def advance(self, rows: Tensor | None, point: Tensor) -> None:
        """Move to points that no line search has to accept, such as those of Adam."""
        p = point - take_rows(self.x, rows)
        if not self._fresh:
            self.move(rows, self.evaluate(rows, p)._replace(point=point), p)
            return
        self._count(rows)
        if rows is None:
            self.x = point
            self.slope.addcmul_(self.rho, p)
        else:
            self.x[rows] = point
            self.slope[rows] = torch.addcmul(self.slope[rows], self.rho[rows], p)

    def _count(self, rows: Tensor | None) -> None:
        if rows is None:
            self.steps += 1
        else:
            self.steps[rows] += 1

    def move(self, rows: Tensor | None, trial: Trial, p: Tensor) -> None:
        """Move to the evaluated point and store the largest curvature met."""
        self._count(rows)
        larger = torch.maximum(take_rows(self.curvature, rows), trial.curvature)
        self.curvature = larger if rows is None else self.curvature.index_copy(0, rows, larger)
        if rows is None:
            self.x, self.value, self.gradient = trial.point, trial.value, trial.gradient
            self.slope.addcmul_(self.rho, p)
        else:
            self.x[rows], self.value[rows], self.gradient[rows] = trial.point, trial.value, trial.gradient
            self.slope[rows] = torch.addcmul(self.slope[rows], self.rho[rows], p)  # same bits as for all rows
