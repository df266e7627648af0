"""What a run will need, before it starts: memory at its peak and time per round.

How many vectors of d numbers a method holds at its peak, it is hard to say and easy to measure: it runs for some rounds
on a miniature with the same graph, in processes of their own, whose largest memory is read afterwards.
"""

import contextlib
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import schedules
from caden.core import Problem
from caden.engine.simulate import simulate
from caden.errors import CadenError, Diverged
from caden.experiments.config import DTYPES, Experiment
from caden.graphs import GRAPHS, Graph, from_edges, regular
from caden.methods import METHODS
from caden.problems import PROBLEMS, network_size
from caden.registry import factory, make, parameters
from caden.solvers import _blocks, lbfgs

_ROWS = 16  # agents of the miniature, if the real ones are more
_CONTAINER = Path("/sys/fs/cgroup")  # what Linux says of this one (control groups, version 2)
_BYTES = 8e6  # of one vector of all agents in the miniature


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
    """Bytes and seconds."""

    vectors: float  # of d numbers per agent, at the peak
    state: int  # bytes of them
    problem: int  # data, model, what a gradient needs, and the program itself
    available: int
    seconds: float  # per round, roughly

    @property
    def fits(self) -> bool:
        return self.state + self.problem <= self.available


Built = tuple[Problem, Graph]


class Size(NamedTuple):
    """How large a problem is."""

    agents: int
    dim: int
    dtype: torch.dtype
    data: int = 0  # bytes that making it takes, as far as the file tells

    @property
    def vector(self) -> int:
        """Bytes of one vector per agent."""
        return self.agents * self.dim * self.dtype.itemsize


def forecast(config: Experiment, built: Built | None = None) -> tuple[Forecast, Built | None]:
    """What running an experiment would take, and its problem and graph; they are not made if the state cannot fit."""
    before, available = forget_peak(), _available()
    size, built = _size_or_build(config, built)
    draw = schedules.Draw(config.seed, size.agents)
    schedules.Participation(schedules.from_spec(config.participation), draw)  # what is wrong is said at once
    steps = schedules.Workload(schedules.from_spec(config.local_steps), draw)(0)
    graph = make("graph", GRAPHS, config.graph, agents=size.agents, seed=config.seed) if built is None else built[1]
    count = vectors(config, graph, size)
    state = int(count * size.vector)
    if built is None and state + size.data > available:
        copies = 6 * size.vector // size.agents  # of the model
        return Forecast(count, state, size.data + copies, available, math.nan), None
    problem, graph = built or config.build()[1:]
    few = torch.arange(min(size.agents, torch.get_num_threads()))
    seconds = _gradient(problem, few) * size.agents / len(few)
    if seconds < 1:
        seconds = _gradient(problem, torch.arange(size.agents))  # many at once may be faster
    found = Forecast(count, state, largest() - before, available, 1.4 * seconds * float(steps.double().mean()))
    return found, (problem, graph)


def _size_or_build(config: Experiment, built: Built | None) -> tuple[Size, Built | None]:
    """The size by the file alone, where that tells; else the problem is built."""
    size = _size(config) if built is None else None
    if size is not None:
        return size, None
    problem, graph = built or config.build()[1:]
    return Size(problem.agents, problem.dim, problem.dtype), (problem, graph)


def _size(config: Experiment) -> Size | None:
    """By the file alone; None if that does not tell, or is wrong."""
    default = {k: p.default for k, p in parameters(factory("problem", PROBLEMS, config.problem)).items()}
    given: dict[str, Any] = dict.fromkeys(("agents", "dim", "samples", "dtype")) | default | config.problem
    agents, dim, samples, dtype = (given[k] for k in ("agents", "dim", "samples", "dtype"))
    if given["name"] == "classification":
        dim = network_size(given["data"], given["model"], given["hidden"])
    elif given["name"] not in PROBLEMS:
        return None
    if config.dtype is not None:
        dtype = DTYPES.get(config.dtype)
    if not all(isinstance(n, int) and n > 0 for n in (agents, dim)) or not isinstance(dtype, torch.dtype):
        return None
    rows = {"quadratic": dim, "logistic": samples}.get(given["name"])  # of a Hessian, of data
    return Size(agents, dim, dtype, 3 * 8 * agents * rows * dim if isinstance(rows, int) else 0)


def _gradient(problem: Problem, rows: Tensor) -> float:
    """Seconds of the gradients of some agents."""
    x = torch.zeros(len(rows), problem.dim, dtype=problem.dtype, device=problem.device)
    some = None if len(rows) == problem.agents else rows.to(problem.device)
    for _ in range(2):
        began = time.perf_counter()
        float(problem.value_and_grad(x, some)[0].sum())  # a GPU is waited for
    return time.perf_counter() - began


def vectors(config: Experiment, graph: Graph, size: Size) -> float:
    """Vectors per agent that the method of an experiment holds at its peak."""
    share = min(1.0, _blocks.NUMBERS // size.dim / graph.agents)  # of the agents that are solved at a time
    if graph.agents > _ROWS:
        degree = min(_ROWS - 1, round(graph.degrees.mean()))
        graph = regular(_ROWS, degree) if degree > 1 else graph
    dim = max(10_000, int(_BYTES / graph.agents / size.dtype.itemsize))
    block = max(1, round(share * graph.agents)) * dim
    task = (config.model_dump(), graph.agents, graph.edges.tolist(), dim, size.dtype, block)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        grown = max(pool.apply(_grown, task) for _ in range(3))  # how memory falls to pieces differs by process
    return float(grown / (graph.agents * dim * size.dtype.itemsize))


def _grown(table: dict[str, Any], agents: int, edges: list[list[int]], dim: int, dtype: torch.dtype, block: int) -> int:
    """Bytes by which a small run makes this process larger than a tiny one did."""
    _blocks.NUMBERS = block
    config, graph = Experiment.model_validate(table), from_edges(edges, agents)
    awake = config.participation if config.participation == 1.0 else 0.9
    steps = min(config.local_steps, 5) if isinstance(config.local_steps, int) else 5
    before = 0
    for size in (8, dim, dim):  # what threads hold at one time varies
        method, bowl = make("method", METHODS, config.method), Bowl(agents, size, dtype)
        with contextlib.suppress(Diverged):  # its parameters are for another problem; its vectors are there
            simulate(method, bowl, graph, 3, participation=awake, local_steps=steps, progress=False)
        before = before or forget_peak()  # that of loading the program
    return largest() - before


def refuse_if_too_large(config: Experiment, built: Built | None = None) -> Built | None:
    """Refuse a run that cannot fit before anything large is made; looks closely only where that is in doubt.

    Returns problem and graph if they had to be built. Looks at the memory of Linux alone, not at that of a GPU.
    """
    if sys.platform != "linux" or config.device != "cpu":
        return built
    make("method", METHODS, config.method)  # what is wrong with its parameters is said first
    size, built = _size_or_build(config, built)
    if (50 + 4 * _pairs(config)[0]) * size.vector + size.data < _available():
        return built
    found, built = forecast(config, built)
    refuse(found, config)
    return built


def refuse(found: Forecast, config: Experiment) -> None:
    """One line with what would fit, if this does not."""
    if found.fits or config.device != "cpu":
        return
    needed, one = found.state + found.problem, found.state / found.vectors
    memory, storage = _pairs(config)
    pair = 2 * one if storage == "full" else one  # of float32 in bfloat16
    fewer = memory - math.ceil((needed - found.available) / pair)
    if fewer >= 1:
        way = f"`method.solver.memory = {fewer}` should fit"
    else:
        way = (
            f"a model of {found.available / needed:.2g} times the size should fit, or agents spread over machines "
            "(docs/cluster.md)"
        )
    gib = [f"{n / 2**30:.1f}" for n in (needed, found.available)]
    raise CadenError(f"The run needs about {gib[0]} GiB of memory and {gib[1]} are available; {way}.")


def _pairs(config: Experiment) -> tuple[int, str]:
    """How many pairs L-BFGS keeps, if it is the local solver, and how."""
    given = parameters(factory("method", METHODS, config.method)).get("solver")
    solver = config.method.get("solver", given.default if given else None)
    table: dict[str, Any] = {"name": "lbfgs", **solver} if isinstance(solver, dict) else {"name": solver}
    memory, storage = (table.get(k, parameters(lbfgs)[k].default) for k in ("memory", "storage"))
    return (memory if table["name"] == "lbfgs" else 0), storage


def largest() -> int:
    """The largest memory that this process has had (getrusage would count its parent's before the start too)."""
    return _field("/proc/self/status", "VmHWM")


def forget_peak() -> int:
    """Let `largest` count from now on; what this process has now."""
    with contextlib.suppress(OSError):  # not everywhere allowed
        Path("/proc/self/clear_refs").write_text("5")
    return largest()


def _available() -> int:
    """Memory that the system, or the container that this runs in, can still give."""
    free = _field("/proc/meminfo", "MemAvailable")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((_CONTAINER / f"memory.{n}").read_text()) for n in ("max", "current"))
        free = min(free, limit - used)
    return free


def _field(file: str, name: str) -> int:
    """Bytes of an entry of Linux's accounts."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        raise CadenError("Memory can be foretold on Linux only.") from None
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
