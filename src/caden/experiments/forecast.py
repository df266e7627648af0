"""Estimate what a run needs before it starts: peak memory and time per round.

The number of vectors of d numbers that a method holds at its peak is hard to derive and easy to measure: the method
runs for a few rounds on a miniature with the same graph, in separate processes whose peak memory is read at the end.
"""

import contextlib
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import schedules
from caden.core import Problem
from caden.draws import Draw
from caden.engine.simulate import simulate
from caden.errors import CadenError, Diverged, RunError
from caden.experiments.config import DTYPES, Experiment
from caden.graphs import GRAPHS, Graph, from_edges, regular
from caden.methods import METHODS
from caden.problems import PROBLEMS, network_size
from caden.registry import factory, make, parameters
from caden.solvers import _blocks, lbfgs

_ROWS = 16  # agents of the miniature, if the experiment has more
_CONTAINER = Path("/sys/fs/cgroup")  # limits of this container on Linux (control groups, version 2)
_BYTES = 8e6  # of one vector per agent in the miniature


class Bowl(Problem):
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


class Forecast(NamedTuple):
    """The estimated memory in bytes and time in seconds."""

    vectors: float  # of d numbers, per agent, at the peak
    state: int  # bytes of these vectors
    problem: int  # data, model, working memory of a gradient, and the program itself
    available: int
    seconds: float  # per round, roughly

    @property
    def fits(self) -> bool:
        return self.state + self.problem <= self.available


Built = tuple[Problem, Graph]


class Size(NamedTuple):
    """The size of a problem."""

    agents: int
    dim: int
    dtype: torch.dtype
    data: int = 0  # bytes to build it, as far as the file determines them

    @property
    def vector(self) -> int:
        """Bytes of one vector of every agent."""
        return self.agents * self.dim * self.dtype.itemsize


def forecast(config: Experiment, built: Built | None = None) -> tuple[Forecast, Built | None]:
    """Estimate what an experiment needs; also return its problem and graph, unless the state cannot fit."""
    before, available = forget_peak(), _available()
    size, built = _size_or_build(config, built)
    draw = Draw(config.seed, size.agents)
    schedules.Participation(schedules.from_spec(config.participation), draw)  # refuses bad input early
    steps = schedules.Workload(config.workload, draw)(0)
    graph = make("graph", GRAPHS, config.graph, agents=size.agents, seed=config.seed) if built is None else built[1]
    count = vectors(config, graph, size)
    state = int(count * size.vector)
    if built is None and state + size.data > available:
        copies = 6 * size.vector // size.agents  # bytes of six copies of the model
        return Forecast(count, state, size.data + copies, available, math.nan), None
    problem, graph = built or config.build()[1:]
    few = torch.arange(min(size.agents, torch.get_num_threads()))
    seconds = _gradient_seconds(problem, few) * size.agents / len(few)
    if seconds < 1:
        seconds = _gradient_seconds(problem, torch.arange(size.agents))  # all agents together may be faster
    estimate = Forecast(count, state, largest() - before, available, 1.4 * seconds * float(steps.double().mean()))
    return estimate, (problem, graph)


def _size_or_build(config: Experiment, built: Built | None) -> tuple[Size, Built | None]:
    """Return the size from the file alone if it determines it; else build the problem."""
    size = _size(config) if built is None else None
    if size is not None:
        return size, None
    problem, graph = built or config.build()[1:]
    return Size(problem.agents, problem.dim, problem.dtype), (problem, graph)


def _size(config: Experiment) -> Size | None:
    """Return the size from the file alone; None if the file does not determine it or is invalid."""
    default = {k: p.default for k, p in parameters(factory("problem", PROBLEMS, config.problem)).items()}
    table: dict[str, Any] = dict.fromkeys(("agents", "dim", "samples", "dtype")) | default | config.problem
    agents, dim, samples, dtype = (table[k] for k in ("agents", "dim", "samples", "dtype"))
    if table["name"] == "classification":
        dim = network_size(table["data"], table["model"], table["hidden"])
    elif table["name"] not in PROBLEMS:
        return None
    if config.dtype is not None:
        dtype = DTYPES.get(config.dtype)
    if not all(isinstance(n, int) and n > 0 for n in (agents, dim)) or not isinstance(dtype, torch.dtype):
        return None
    rows = {"quadratic": dim, "logistic": samples}.get(table["name"])  # of a Hessian, of data
    return Size(agents, dim, dtype, 3 * 8 * agents * rows * dim if isinstance(rows, int) else 0)


def _gradient_seconds(problem: Problem, rows: Tensor) -> float:
    """Time the gradients of some agents."""
    x = torch.zeros(len(rows), problem.dim, dtype=problem.dtype, device=problem.device)
    some = None if len(rows) == problem.agents else rows.to(problem.device)
    for _ in range(2):
        began = time.perf_counter()
        float(problem.value_and_grad(x, some)[0].sum())  # waits for a GPU
    return time.perf_counter() - began


def vectors(config: Experiment, graph: Graph, size: Size) -> float:
    """Measure how many vectors per agent the method of an experiment holds at its peak."""
    share = min(1.0, _blocks.NUMBERS // size.dim / graph.agents)  # of the agents that are solved together
    if graph.agents > _ROWS:
        degree = min(_ROWS - 1, round(graph.degrees.mean()))
        graph = regular(_ROWS, degree) if degree > 1 else graph
    dim = max(10_000, int(_BYTES / graph.agents / size.dtype.itemsize))
    block = max(1, round(share * graph.agents)) * dim
    task = (config.model_dump(), graph.agents, graph.edges.tolist(), dim, size.dtype, block)
    growth = max(_in_new_process(_memory_growth, *task) for _ in range(3))  # fragmentation differs between processes
    return float(growth / (graph.agents * dim * size.dtype.itemsize))


def _in_new_process(function: Callable[..., int], *arguments: Any) -> int:
    """Call a function in a process of its own; a process that is killed is an error, not a wait without end."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise RunError("The process that measures the memory of a small run was killed.") from None


def _memory_growth(
    table: dict[str, Any], agents: int, edges: list[list[int]], dim: int, dtype: torch.dtype, block: int
) -> int:
    """Return the bytes by which a small run raises the peak memory of this process above that of a tiny run."""
    _blocks.NUMBERS = block
    config, graph = Experiment.model_validate(table), from_edges(edges, agents)
    awake = config.participation if config.participation == 1.0 else 0.9
    steps = min(config.workload, 5) if isinstance(config.workload, int) else 5
    before = 0
    for size in (8, dim, dim):  # the memory that threads hold together varies
        method, bowl = make("method", METHODS, config.method), Bowl(agents, size, dtype)
        with contextlib.suppress(Diverged):  # its parameters are for another problem, but its vectors are allocated
            simulate(method, bowl, graph, 3, participation=awake, local_steps=steps, progress=False)
        before = before or forget_peak()  # the memory of the program itself
    return largest() - before


def refuse_if_too_large(config: Experiment, built: Built | None = None) -> Built | None:
    """Refuse a run that cannot fit, before anything large is built; measure only if a rough bound is exceeded.

    Returns problem and graph if they had to be built. Checks main memory on Linux only, not that of a GPU.
    """
    if sys.platform != "linux" or config.device != "cpu":
        return built
    make("method", METHODS, config.method)  # reports invalid parameters first
    size, built = _size_or_build(config, built)
    if (50 + 4 * _pairs(config)[0]) * size.vector + size.data < _available():
        return built
    estimate, built = forecast(config, built)
    refuse(estimate, config)
    return built


def refuse(found: Forecast, config: Experiment) -> None:
    """Raise an error that suggests what would fit, if the estimate does not."""
    if found.fits or config.device != "cpu":
        return
    needed, vector = found.state + found.problem, found.state / found.vectors
    memory, storage = _pairs(config)
    pair = 2 * vector if storage == "full" else vector  # two vectors of float32, or of bfloat16
    fewer = memory - math.ceil((needed - found.available) / pair)
    if fewer >= 1:
        suggestion = f"`method.solver.memory = {fewer}` should fit"
    else:
        suggestion = (
            f"a model of {found.available / needed:.2g} times the size should fit, or agents spread over machines "
            "(docs/cluster.md)"
        )
    gib = [f"{n / 2**30:.1f}" for n in (needed, found.available)]
    raise CadenError(f"The run needs about {gib[0]} GiB of memory, but {gib[1]} GiB are available; {suggestion}.")


def _pairs(config: Experiment) -> tuple[int, str]:
    """Return how many pairs L-BFGS stores (0 with another local solver) and in which format."""
    parameter = parameters(factory("method", METHODS, config.method)).get("solver")
    solver = config.method.get("solver", parameter.default if parameter else None)
    table: dict[str, Any] = {"name": "lbfgs", **solver} if isinstance(solver, dict) else {"name": solver}
    memory, storage = (table.get(k, parameters(lbfgs)[k].default) for k in ("memory", "storage"))
    return (memory if table["name"] == "lbfgs" else 0), storage


def largest() -> int:
    """Return the peak memory of this process (getrusage would include its parent's before the start)."""
    return _field("/proc/self/status", "VmHWM")


def forget_peak() -> int:
    """Reset the peak that `largest` returns, and return the memory of this process now."""
    with contextlib.suppress(OSError):  # not allowed everywhere
        Path("/proc/self/clear_refs").write_text("5")
    return largest()


def _available() -> int:
    """Return the memory that is still available in the system, or in the container that this runs in."""
    free = _field("/proc/meminfo", "MemAvailable")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((_CONTAINER / f"memory.{n}").read_text()) for n in ("max", "current"))
        free = min(free, limit - used)
    return free


def _field(file: str, name: str) -> int:
    """Return the bytes of an entry of a file under /proc."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        raise CadenError("Memory can be estimated on Linux only.") from None
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
