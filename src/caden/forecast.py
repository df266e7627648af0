"""What a run will need, before it starts: memory at its peak and time per round.

How many vectors of d numbers a method holds at its peak, it is hard to say and easy to measure: it runs for two rounds
on a miniature with the same graph, in a process of its own, whose largest memory is read afterwards.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import schedules
from caden.config import Experiment
from caden.core import Problem
from caden.errors import CadenError
from caden.graphs import Graph, from_edges, regular
from caden.methods import METHODS
from caden.registry import make
from caden.run import simulate, start_point
from caden.solvers import _blocks

_ROWS = 16  # agents of the miniature, if the real ones are more
_BYTES = 8e6  # of one vector of all agents in the miniature


class Bowl:
    """f_i(x) = sum_l c_l (x_l - i)^2 / 2: a problem that needs no memory of its own."""

    def __init__(self, agents: int, dim: int, dtype: torch.dtype):
        self.agents, self.dim, self.dtype, self.device = agents, dim, dtype, torch.device("cpu")
        self.curvature = 1 + torch.arange(dim, dtype=dtype) % 7

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        centre = (torch.arange(self.agents) if rows is None else rows).to(x.dtype).unsqueeze(1)
        gradient = x - centre
        value = torch.linalg.vector_norm(gradient, dim=1) ** 2 / 2
        gradient *= self.curvature
        return value, gradient

    def hvp(self, x: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        return self.curvature * v

    def take(self, agents: list[int]) -> Bowl:
        return Bowl(len(agents), self.dim, self.dtype)

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        return {}


class Forecast(NamedTuple):
    """Bytes and seconds."""

    vectors: float  # of d numbers per agent, at the peak
    state: int  # bytes of them
    problem: int  # data, model, what a gradient needs, and the program itself
    available: int
    seconds: float  # per round, roughly

    @property
    def fits(self) -> bool:
        return self.state + self.problem <= self.available


def forecast(config: Experiment) -> Forecast:
    """Build an experiment's problem and say what running it would take."""
    before = largest()
    available = _available()
    _, problem, graph = config.build()
    x, some = start_point(problem.take([0]), None), None
    if 6 * problem.agents * x.numel() * x.element_size() > available / 2:
        some = torch.tensor([0])  # already the gradients of all might be too much
    x = x.expand(problem.agents if some is None else 1, -1)
    problem.value_and_grad(x, some)
    began = time.perf_counter()
    problem.value_and_grad(x, some)
    seconds = (time.perf_counter() - began) * problem.agents / len(x)
    draw = schedules.Draw(config.seed, graph.agents)
    steps = schedules.Workload(schedules.from_spec(config.local_steps), draw)(0)
    count = vectors(config, graph, problem)
    state = int(count * problem.agents * problem.dim * x.element_size())
    return Forecast(count, state, largest() - before, available, 1.4 * seconds * float(steps.double().mean()))


def vectors(config: Experiment, graph: Graph, problem: Problem) -> float:
    """Vectors per agent that the method of an experiment holds at its peak."""
    if graph.agents > _ROWS:
        degree = min(_ROWS - 1, round(graph.degrees.mean()))
        graph = regular(_ROWS, degree) if degree > 1 else graph
    size = torch.empty(0, dtype=problem.dtype).element_size()
    dim = min(problem.dim, max(10_000, int(_BYTES / graph.agents / size)))
    share = min(1.0, _blocks.NUMBERS // problem.dim / problem.agents)  # of the agents that are solved at a time
    block = max(1, round(share * graph.agents)) * dim
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        grown = pool.apply(_grown, (config.model_dump(), graph.agents, graph.edges.tolist(), dim, problem.dtype, block))
    return float(grown / (graph.agents * dim * size))


def _grown(table: dict[str, Any], agents: int, edges: list[list[int]], dim: int, dtype: torch.dtype, block: int) -> int:
    """Bytes by which a small run makes this process larger than a tiny one did."""
    _blocks.NUMBERS = block
    config, graph = Experiment.model_validate(table), from_edges(edges, agents)
    awake = config.participation if config.participation == 1.0 else 0.9
    steps = config.local_steps if isinstance(config.local_steps, int) else 5
    for size in (8, dim):
        before = largest()
        method = make("method", METHODS, config.method)
        simulate(method, Bowl(agents, size, dtype), graph, 3, participation=awake, local_steps=steps, progress=False)
    return largest() - before


def check(config: Experiment) -> None:
    """Refuse a run that cannot fit; looks closely only where that is in doubt."""
    agents, dim = config.problem.get("agents", 0), config.problem.get("dim", 0)
    if isinstance(agents, int) and isinstance(dim, int) and agents * dim > 1e8:
        refuse(forecast(config), config)


def refuse(found: Forecast, config: Experiment) -> None:
    """One line with what would fit, if this does not."""
    if found.fits:
        return
    solver = config.method.get("solver")
    solver = solver if isinstance(solver, dict) else {}
    memory, full = solver.get("memory", 10), solver.get("storage", "full") == "full"
    pair = (2 if full else 1) * found.state / found.vectors  # of float32 in bfloat16
    spare = int((found.state + found.problem - found.available) / pair) + 1
    if memory - spare >= 1:
        way = f"`method.solver.memory = {memory - spare}` would fit"
    else:
        way = (
            'use `method.solver.storage = "bfloat16"`, a smaller model, fewer agents, float32, or spread the agents '
            "over machines (docs/cluster.md)"
        )
    gib = [f"{n / 2**30:.1f}" for n in (found.state + found.problem, found.available)]
    raise CadenError(f"The run needs about {gib[0]} GiB of memory and {gib[1]} are available; {way}.")


def largest() -> int:
    """The largest memory that this process has had (getrusage would count its parent's before the start too)."""
    return _field("/proc/self/status", "VmHWM")


def forget_peak() -> int:
    """Let `largest` count from now on; what this process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return largest()


def _available() -> int:
    """Memory that the system can still give."""
    return _field("/proc/meminfo", "MemAvailable")


def _field(file: str, name: str) -> int:
    """Bytes of an entry of Linux's accounts."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        raise CadenError("Memory can be foretold on Linux only.") from None
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
