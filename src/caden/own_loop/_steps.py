"""The user's side: each optimizer step becomes a step on the method's subproblem.

Before a step, slope + rho (v - begin) is added to the gradients; after the last step of a round, the new row is handed
back. The slope is kept up to date step by step, as in `solvers._iterate`, so that the bits are the same.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import torch
from torch import Tensor

from caden._tensor.rows import row_norms
from caden.errors import CadenError, RunError, require_integer
from caden.own_loop._loop import Done, Handoff, Task
from caden.own_loop._parameters import Parameters, moved
from caden.schedules import auto
from caden.solvers._iterate import accurate


class Every(NamedTuple):
    """How long a round is: `steps` steps, `seconds` seconds, or (neither) until more steps would not help."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, every: int | str) -> Every:
        """Return it from 20 (steps), "30s" or "auto"."""
        if every == "auto":
            return cls()
        if isinstance(every, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)s", every)) and float(match[1]) > 0:
            return cls(seconds=float(match[1]))
        if isinstance(every, str):
            raise CadenError(f'`every` must be a number of steps, seconds like "30s", or "auto", got {every!r}.')
        return cls(steps=require_integer("every", every, least=1))

    @property
    def local_steps(self) -> object:
        """What the run is told of it."""
        return self.steps if self.steps is not None else auto() if self.seconds is None else 1


class Steps:
    """The steps of the current round."""

    def __init__(self, parameters: Parameters, handoff: Handoff, every: Every):
        self.parameters, self._handoff, self._every = parameters, handoff, every
        self.task: Task | None = None
        self.over = False  # the run has ended: further steps are the user's alone
        self.count = self.total = 0  # steps of this round, and of all
        self.waited = 0.0  # seconds spent waiting for the method and its messages
        self._began = 0.0
        self._slope = self._old = self._new = torch.empty(1, 0)
        self._lost: Tensor | None = None  # what the parameters cannot hold of `begin`
        self._sum: Tensor | None = None  # of gradients, for "measure"
        self._first = torch.zeros(1)  # norm of the first gradient, for "auto"
        self._waits = False  # a result was handed in, and the next task has not come yet
        self.round = -1

    def receive(self) -> None:
        """Wait for the next task, and load its beginning into the model."""
        began = time.perf_counter()
        task = self._handoff.take()
        self._waits = False
        self.waited += time.perf_counter() - began
        self.round = self.round + 1 if task is None else task.round
        if task is None or task.kind != "gradient" or self.task is None or task.round != self.task.round:
            self.count = 0  # a round of gradients is one task for each
        self.task, self.over = task, task is None
        if task is None:
            return
        parameters, device = self.parameters, self.parameters.device
        parameters.write(task.begin)
        self._began, self._sum, self._lost = time.monotonic(), None, None
        if task.kind == "gradient":
            return
        self._old, self._new = parameters.row(), torch.empty(1, parameters.dim, dtype=parameters.dtype, device=device)
        if parameters.is_rounded:
            self._lost = moved(task.begin, device) - self._old
        if task.slope is not None:
            self._slope = moved(task.slope, device).clone()

    @torch.no_grad()
    def before(self) -> None:
        """Add the method's part to the gradients."""
        task = self.task
        if task is not None and task.kind == "solve" and self._every == Every() and self._is_accurate(task):
            self.hand_in()  # the next round begins where this one ends, so the gradients are still good
        if self.task is None:
            return
        if self.task.kind == "solve":
            self.parameters.add_to_gradients(self.parameters.views(self._slope))
        else:
            gradient = self.parameters.gradient()
            self._sum = gradient if self._sum is None else self._sum.add_(gradient)

    @torch.no_grad()
    def after(self) -> None:
        """Count a step that was made, and end the round if it was the last one."""
        if self.task is None:
            return
        self.count, self.total, task = self.count + 1, self.total + 1, self.task
        if task.kind == "solve":
            assert task.rho is not None
            self.parameters.read(self.parameters.views(self._new))
            way = torch.sub(self._new, self._old, out=self._old)
            self._slope.addcmul_(task.rho.to(way.device), way)
            self._old, self._new = self._new, way
        if self._is_last(task):
            self.hand_in()

    def _is_last(self, task: Task) -> bool:
        if task.kind == "gradient":
            return True
        if self._every.seconds is not None:
            return time.monotonic() - self._began >= self._every.seconds
        if task.kind == "measure":
            return self.count >= (self._every.steps or 1)
        return self._every.steps is not None and self.count >= task.steps

    def _is_accurate(self, task: Task) -> bool:
        gradient = self.parameters.gradient()
        if self.count == 0:
            self._first = row_norms(gradient + self._slope)
            return False
        if self.count >= task.steps:
            return True
        assert task.rho is not None and task.accuracy is not None
        device = gradient.device
        way, rho = self._old - moved(task.begin, device), task.rho.to(device).squeeze(1)
        stops = accurate(gradient, self._slope, way, rho, self._first, task.accuracy, task.overshoot)
        return bool(stops)

    def result(self) -> Tensor:
        """Return the row that the steps of this round have led to."""
        assert self.task is not None
        row = self.parameters.row()
        return row if self._lost is None else row + self._lost

    def hand_in(self, ended: bool = False) -> None:
        """End the round here, and wait for the next one; `ended`: there will be none."""
        if self._waits:  # the last wait was interrupted
            self.receive()
        task, rows = self.task, self._sum
        if task is None:
            return
        if task.kind == "solve":
            rows = self.result()
        elif task.kind == "measure" and rows is not None:
            way = row_norms(self.parameters.row() - self._old)
            rows = (row_norms(rows / self.count) / way).reshape(1, 1)
        elif rows is None:  # the loop has ended before its first gradient
            rows = torch.ones(1, 1)
        broken = self.parameters.not_finite(rows) if task.kind == "solve" else None
        if broken is not None:
            raise RunError(
                f"`{broken}` is not finite after step {self.total}, so the round was not sent: look for NaN in the "
                "gradients, or lower the learning rate."
            )
        made = self.count if task.kind != "gradient" else int(self._sum is not None)
        self._handoff.answer(Done(rows, made, ended))
        self._waits = True
        self.receive()

    def state(self) -> dict[str, Tensor]:
        """Return the place within the round."""
        numbers = torch.tensor([self.count, self.total])
        return {"counts": numbers, "slope": self._slope.clone(), "row": self._old.clone(), "first": self._first.clone()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue at a place within the round."""
        self.count, self.total = state["counts"].tolist()
        device = self.parameters.device
        self._slope, self._old, self._first = (state[n].to(device, copy=True) for n in ("slope", "row", "first"))
        self.parameters.write(self._old)
