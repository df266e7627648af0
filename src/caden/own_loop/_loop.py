"""The two sides of a training loop that works for a method.

The method runs in a thread of its own, unchanged. Its local solver (or, for methods without one, its problem) hands a
task over and waits; the user's thread takes the task, makes its own steps, and hands the result back. Only one of the
two works at any time. An error of the method is raised in the user's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden.core import Info, LocalSolver, Objective, Problem, Solved
from caden.engine.checkpoint import Part
from caden.errors import CadenError, Diverged, LoopEnded, RunError
from caden.methods._auto import curvature_of_steps
from caden.own_loop._parameters import Parameters, moved
from caden.solvers._iterate import Memory

Agree = Callable[[list[float]], list[float]]  # the largest of each number over all processes


class Task(NamedTuple):
    """What a method asks of the loop: `steps` steps from `begin` on f(v) + slope.(v - begin) + rho/2 |v - begin|^2.

    "measure": steps on f alone, to see how far they lead. "gradient": a single gradient at `begin`.
    """

    kind: str  # "solve", "measure" or "gradient"
    begin: Tensor  # (1, d)
    steps: int = 1
    round: int = -1
    slope: Tensor | None = None  # (1, d)
    rho: Tensor | None = None  # (1, 1)
    accuracy: float | None = None  # the loop may end at this relative error, see `core.Objective`
    overshoot: float = 0.25


class Done(NamedTuple):
    """What the loop did: where its steps ended, the gradient, or for "measure" |mean gradient| / |way|."""

    row: Tensor  # (1, d); (1, 1) for "measure"
    steps: int
    ended: bool = False  # no more steps will come


class Restored(Exception):
    """The user has loaded another state, from which the run continues. Never reaches the user."""

    def __init__(self, part: Part):
        self.part = part


class Handoff:
    """Where the two threads meet."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Task] = queue.Queue(1)
        self._answers: queue.Queue[Done | Part] = queue.Queue(1)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run the method in a thread."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=guarded, name="caden-agent", daemon=True)
        self._thread.start()

    def ask(self, task: Task) -> Done:
        """Hand a task over, and wait for the result; called by the method."""
        self._tasks.put(task)
        answer = self._answers.get()
        if isinstance(answer, Part):
            raise Restored(answer)
        return answer

    def answer(self, answer: Done | Part) -> None:
        """Hand a result back, or a state from which to continue; called by the loop."""
        self._answers.put(answer)

    def take(self) -> Task | None:
        """Wait for the next task; None if the method has ended. Raises what the method raised."""
        assert self._thread is not None
        running = True
        while running:
            running = self._thread.is_alive()  # before the last look
            with suppress(queue.Empty):
                return self._tasks.get(timeout=0.1 if running else 0)
        self.raise_error()
        return None

    def raise_error(self) -> None:
        """Raise what the method raised, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class OwnLoop(Problem):
    """The function of one agent, known only by the gradients of the user's loop."""

    stochastic = True

    def __init__(self, parameters: Parameters, handoff: Handoff, device: torch.device, as_oracle: bool):
        self._handoff, self._as_oracle = handoff, as_oracle
        self.agents, self.dim, self.dtype, self.device = 1, parameters.dim, parameters.dtype, device
        self.shapes = [p.shape for p in parameters.tensors]
        self.start = parameters.row()[0].to(device)
        self.save: Callable[[], dict[str, Tensor]] = dict
        self.load: Callable[[dict[str, Tensor]], None] = lambda buffers: None
        self.agree: Agree = lambda values: values
        self.round, self.ended = -1, False  # ended: the loop of some agent has ended, so the run does, too
        self.diverged = False  # after the last round

    def at(self, round: int) -> Problem:
        self.round = round
        return self

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Load x into the model, and wait for a gradient there; the value is unknown."""
        if not self._as_oracle:
            raise CadenError("This method asks for gradients of its own, which a training loop cannot give.")
        done = self._handoff.ask(Task("gradient", x.clone(), round=self.round))
        self.decide(done)
        if done.ended:
            raise RunError("A training loop ended within a round, which this method needs in full.")
        return x.new_full((1,), torch.nan), moved(done.row, x.device)

    def known_curvature(self, x: Tensor) -> Tensor | None:
        """Let the loop make some steps, and compare its mean gradient with the way they led.

        Differences of gradients would show the noise of mini-batches rather than curvature.
        """
        done = self._handoff.ask(Task("measure", x.clone()))
        self.decide(done)
        return curvature_of_steps(done.row.to(x.device).reshape(1))

    def decide(self, done: Done) -> None:
        """End the run if a loop has: after this round, or before it if no loop has made a step in it.

        This is the only thing that all processes agree on in a round. It comes after the local steps, when the link is
        idle even if rows travel during them.
        """
        idle = done.ended and done.steps == 0
        ended, busy, diverged = self.agree([float(done.ended), float(not idle), float(self.diverged)])
        if diverged:
            raise Diverged
        self.ended = self.ended or bool(ended)
        if ended and not busy:
            raise LoopEnded

    def buffers(self) -> dict[str, Tensor]:
        return self.save()

    def restore(self, buffers: dict[str, Tensor]) -> None:
        if buffers:  # else the user restores them
            self.load(buffers)


def own_solver(handoff: Handoff, problem: OwnLoop, fresh: bool = True) -> LocalSolver:
    """The user's loop as a local solver."""

    def init(functions: Problem, x: Tensor, curvature: Tensor | None) -> Memory:
        zero = x.new_zeros(len(x))
        return Memory(zero, x.new_zeros(len(x), 0), zero)  # neither value nor gradient is known

    def solve(objective: Objective, x: Tensor, work: Tensor, memory: Any) -> Solved:
        done = Done(x, 0)
        if int(work[0]) > 0:
            rest = objective.slope, objective.rho, objective.accuracy, objective.overshoot
            done = handoff.ask(Task("solve", x, int(work[0]), problem.round, *rest))
        problem.decide(done)
        objective.problem.gradients += done.steps  # type: ignore[attr-defined]  # counted by the run
        steps = torch.full_like(work, done.steps)
        return Solved(moved(done.row, x.device), memory, Info(steps=steps, seen=x.new_full((1,), torch.nan)))

    return LocalSolver(init, solve, "own_loop", fresh=fresh)
