"""A run: the state of a method over a network. Simulations, ranks of a cluster, peers, benchmarks and replays all step
this one object; each decides itself what to record and when to end."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caden._tensor.states import flatten, restore
from caden.core import Info, Method, Problem, complete
from caden.engine.checkpoint import Part
from caden.engine.redeal import redeal
from caden.engine.warmup import Warmup, start_point, warm_up
from caden.errors import CadenError
from caden.networks.network import Network
from caden.networks.timers import Turn
from caden.schedules import Participation, Workload

_TESTS = 10  # rounds may look at the test data at most for one part in so many of their gradients' time
_GROWTH = 1e8  # a model whose norm exceeds this many times 1 + the largest at the start has diverged


class _Tally:
    """Gradients and their seconds, counted in threads."""

    def __init__(self) -> None:
        self.gradients, self.seconds, self.lock = 0, 0.0, Lock()
        self.by_agent: np.ndarray | None = None  # (k,) if a clock wants it


def _require(what: str, got: object, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return what a problem computed, if it is of the right kind: compiled loops would read beyond its end."""
    if not isinstance(got, Tensor) or got.shape != shape or got.dtype != dtype:
        kind = f"{tuple(got.shape)} of {got.dtype}" if isinstance(got, Tensor) else repr(got)
        raise CadenError(f"`value_and_grad` must return {what} of shape {tuple(shape)} of {dtype}, got {kind}.")
    return got.detach()


class CountingProblem(Problem):
    """A problem that counts and times its gradients, one per agent and evaluation; in a round it is that round's."""

    def __init__(self, problem: Problem):
        self.whole, self._now, self._tally = problem, complete(problem.at(-1)), _Tally()
        self.agents, self.dim, self.dtype, self.device = problem.agents, problem.dim, problem.dtype, problem.device
        self.hessian, self.execution, self.shapes = problem.hessian, problem.execution, problem.shapes
        self.stochastic = self._now.stochastic
        self.assumed: Tensor | None = None  # (k,) curvature, while a run is restored: nothing is measured then

    @property
    def gradients(self) -> int:
        return self._tally.gradients

    @gradients.setter
    def gradients(self, count: int) -> None:
        self._tally.gradients = count

    @property
    def seconds(self) -> float:
        return self._tally.seconds

    @property
    def by_agent(self) -> np.ndarray:
        """(k,) gradients of each agent."""
        if self._tally.by_agent is None:
            self._tally.by_agent = np.zeros(self.agents, np.int64)
        return self._tally.by_agent

    @by_agent.setter
    def by_agent(self, counts: np.ndarray) -> None:
        self._tally.by_agent = counts

    def forget(self) -> None:
        """Count from zero again."""
        self._tally.gradients, self._tally.seconds = 0, 0.0

    def _of(self, functions: Problem) -> CountingProblem:
        if functions is self._now:
            return self
        view, functions = copy.copy(self), complete(functions)
        view._now, view.stochastic = functions, functions.stochastic
        return view

    def at(self, round: int) -> CountingProblem:
        return self._of(self.whole.at(round))

    @property
    def exact(self) -> CountingProblem:
        """The functions to be minimised, of all samples."""
        return self._of(self.whole)

    def redraw(self, step: int) -> CountingProblem:
        return self._of(self._now.redraw(step))

    def prepare(self, rows: Tensor | None) -> None:
        self._now.prepare(rows)

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        value, gradient = self._now.value_and_grad(x, rows)
        self._count(x.shape[0], 1, rows, time.perf_counter() - began)
        return _require("values", value, x.shape[:1], x.dtype), _require("gradients", gradient, x.shape, x.dtype)

    def descend(self, x: Tensor, step: float, correction: Tensor, work: Tensor) -> Tensor | None:
        began = time.perf_counter()
        end = self._now.descend(x, step, correction, work)
        if end is not None:
            steps = work.numpy(force=True)
            self._count(int(steps.sum()), steps, None, time.perf_counter() - began)
        return end

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        began = time.perf_counter()
        product = self._now.hvp(x, v, rows)
        self._count(2 * len(x), 2, rows, time.perf_counter() - began)  # a gradient, and the derivative of one
        return product

    def _count(self, gradients: int, each: int | np.ndarray, rows: Tensor | None, seconds: float) -> None:
        """Count gradients, of which `each` are those of every agent of `rows`."""
        tally = self._tally
        with tally.lock:
            tally.gradients += gradients
            if tally.by_agent is not None:
                tally.by_agent[slice(None) if rows is None else rows.cpu().numpy()] += each
            tally.seconds += seconds

    def known_curvature(self, x: Tensor) -> Tensor | None:
        return self.whole.known_curvature(x) if self.assumed is None else self.assumed


class Run:
    """`begin`, then `step` by `step`; `flatten` and `restore` for checkpoints.

    `awake` and `work` give (m,) who takes part in a round and how much each does.
    """

    def __init__(
        self,
        method: Method,
        problem: Problem,
        network: Network,
        awake: Participation,
        work: Workload,
    ):
        self.method, self.problem, self.network = method, CountingProblem(problem), network
        self._awake, self._work = awake, work
        self.counts_steps = work.accuracy is not None  # agents decide how many local steps they take
        self.index = 0  # rounds done
        self.rounds, self.record_every = 0, 1  # rounds planned (0: unknown), and between two rows
        self.active = network.graph.agents  # how many were awake in the last one
        self.info = Info()
        self.outside: tuple[str, ...] = ()  # conditions that the method is known not to survive
        self.seconds = 0.0  # of rounds, without metrics
        self.counts = {"rejected": 0, "fallbacks": 0, "stalled": 0}
        self.curvature: Tensor | None = None
        self.state: Any = None
        self._bound = 0.0
        self.timer = network.timer
        if self.timer is not None:
            self.timer.gradients = self._gradients
            self.timer.planned, self.timer.adaptive = lambda index: self._work(index).numpy(), work.accuracy is not None
            self.problem.by_agent = np.zeros(self.problem.agents, np.int64)

    def _gradients(self) -> np.ndarray:
        return self.problem.by_agent.copy()

    def start(self, x0: Tensor | None) -> Tensor:
        """Return the (k, d) starting point of the hosted agents, given that of all, if any."""
        if x0 is not None and x0.ndim == 2 and len(x0) == self.network.graph.agents:
            x0 = x0[self.network.layout.hosted]
        return start_point(self.problem.whole, x0)

    def begin(self, start: Tensor, warmup: Warmup | None = None) -> None:
        """Warm up, check the parameters against theory, and exchange starting points."""
        if self.problem.whole.waited:
            self.problem.whole.waited[0] = 0.0  # of earlier runs
        if warmup is not None:
            start, self.curvature = warm_up(self.problem.exact, start, warmup)
        norms = torch.linalg.vector_norm(start, dim=1)
        self._bound = _GROWTH * (1 + self.network.transport.reduce([float(norms.max())], "max")[0])
        everyone = torch.ones(self.network.graph.agents, dtype=torch.bool)
        context = self.network.round(-1, everyone, self._work(0), self.problem, self.curvature, self._work.accuracy)
        if self.method.examine is not None:
            refusal, warning = self.method.examine(context)
            if refusal:
                raise CadenError(refusal)
            if warning:
                warnings.warn(warning, stacklevel=4)
        self.state = self.method.init(start, context)
        if self.timer is not None:
            self.timer.begin()

    def step(self) -> Info:
        """Run one round; if everyone sleeps, nothing changes. Without rounds: until the slowest agent has stepped."""
        began, done, self.active, self.info = time.perf_counter(), self.index, 0, Info()
        while done == self.index:
            turn = Turn(self.index, self._awake(self.index))
            turn = turn if self.timer is None else self.timer.turn(*turn)
            self._advance(turn)
            done = self.index + 1 if self.timer is None else self.timer.end_turn(turn)
        self.index = done
        self.seconds += time.perf_counter() - began
        return self.info

    def _advance(self, turn: Turn) -> None:
        index, active = turn
        awake = len(active) if active is self._awake.everyone else int(active.sum())
        self.active += awake
        if awake == 0:
            return
        elapsed = min(index / self.rounds, 1.0) if self.rounds else 0.0
        facts = self.problem.at(index), self.curvature, self._work.accuracy, elapsed, awake
        context = self.network.round(index, active, self._work(index), *facts)
        self.state, self.info = self.method.advance(self.state, context)
        self.counts["rejected"] += self.info.rejected
        self.counts["fallbacks"] += self.info.fallbacks
        self.counts["stalled"] += len(self.info.stalled)

    def sound(self) -> Tensor:
        """Return (k,) which hosted agents have a finite loss and a model within reasonable bounds."""
        fine: Tensor = torch.linalg.vector_norm(self.state.x, dim=1) <= self._bound
        return fine if self.info.value is None else fine & self.info.value.isfinite()

    def _all_sound(self) -> bool:
        """Return whether all hosted agents are sound: two numbers about all of them say so in nearly every round."""
        value = self.info.value
        bounded = float(torch.linalg.vector_norm(self.state.x)) <= self._bound
        if bounded and (value is None or math.isfinite(float(value.sum()))):
            return True
        return bool(self.sound().all())

    def diverged(self) -> list[int]:
        """Return the agents whose model or loss is not finite, or whose model has grown beyond any reasonable bound."""
        transport = self.network.transport
        if not transport.reduce([float(not self._all_sound())], "max")[0]:
            return []
        fine = self.sound()
        if transport.world == 1:
            return [int(agent) for agent in self.network.layout.hosted[~fine.cpu()]]
        lost: list[int] = (transport.gather(fine.int()) == 0).nonzero().flatten().tolist()
        return lost

    def flatten(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return everything that determines the rest of the run."""
        tensors = flatten(self.state, "state")
        tensors |= {f"network.{name}": tensor for name, tensor in self.network.buffers().items()}
        tensors |= {f"problem.{name}": tensor for name, tensor in self.problem.whole.buffers().items()}
        if self.curvature is not None:
            tensors["curvature"] = self.curvature
        if self.timer is not None:
            tensors["gradients"] = torch.from_numpy(self.problem.by_agent.copy())
        return tensors, {
            "round": self.index,
            "seconds": self.seconds,
            "numbers_sent": self.network.numbers_sent,
            "bytes": self.network.bytes,
            "wire_bytes": self.network.transport.wire_bytes,
            "gradients": self.problem.gradients,
            **self.counts,
            **({"read_seconds": self.problem.whole.waited[0]} if self.problem.whole.waited else {}),
            "bound": self._bound,
        }

    def restore(self, start: Tensor, parts: Sequence[Part]) -> Part:
        """Restore what `flatten` returned, in as many parts as processes saved it; `start` gives the state its shape.

        Returns the part of this process.
        """
        layout, transport = self.network.layout, self.network.transport
        # The values are restored below.
        self.problem.assumed = torch.ones(layout.agents, dtype=self.problem.dtype, device=self.problem.device)
        self.begin(start)
        self.problem.assumed = None
        part = parts[0]
        if len(parts) > 1 or part.facts.get("hosted", layout.hosted.tolist()) != layout.hosted.tolist():
            part = redeal(parts, flatten(self.state, "state"), layout, transport.rank == 0)
        tensors, numbers = part.tensors, part.numbers
        if "curvature" in tensors:
            self.curvature = tensors["curvature"].to(self.problem.device)
        self.state = restore(self.state, tensors, "state")
        self.network.restore(_named("network.", tensors), int(numbers["numbers_sent"]), int(numbers["bytes"]))
        self.problem.whole.restore(_named("problem.", tensors))
        if self.timer is not None:
            self.problem.by_agent = tensors["gradients"].numpy().copy()
        transport.wire_bytes = int(numbers.get("wire_bytes", 0))
        self.problem.gradients, self._bound = int(numbers["gradients"]), numbers["bound"]
        self.index, self.seconds = int(numbers["round"]), numbers["seconds"]
        self.counts = {name: int(numbers[name]) for name in self.counts}
        if self.problem.whole.waited:
            self.problem.whole.waited[0] = numbers.get("read_seconds", 0.0)
        return part

    @property
    def tested(self) -> bool:
        """Whether mini-batch runs look at the test data now: seldom enough to take a tenth of the gradients' time."""
        work = float(torch.stack([self._work(round) for round in range(10)]).double().mean())
        gradients = max(work * float(self._awake.probability(0).mean()), 0.1)
        every = math.ceil(_TESTS * self.problem.whole.metrics_cost / gradients / self.record_every)
        return self.index % (max(every, 1) * self.record_every) == 0

    def scalars(self) -> dict[str, float]:
        """Return the single numbers of the method's state, such as mu_z; the largest, if every agent has its own."""
        fields = flatten(self.state, "").items()
        single = [(name, value) for name, value in fields if value.ndim == 0 or name == ".mu_z"]
        return {name.removeprefix("."): float(value.max()) for name, value in single}


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
