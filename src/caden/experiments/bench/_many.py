"""Many agents: seconds to start, memory, and time per edge."""

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import torch

from caden import graphs, methods, problems, solvers
from caden._tensor.memory import keep_freed_memory
from caden.experiments.bench._measure import MU, Measure, Rounds
from caden.experiments.forecast import forget_peak, largest


def many(repeats: int) -> Iterator[Measure]:
    """Measure 100 to 10,000 agents with 1,000 parameters: time per edge, start-up, memory; one process per graph."""
    for kind in ("ring", "random 4-regular"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            yield from pool.apply(_many, (kind, repeats, torch.get_num_threads()))
    yield from huge(repeats)


# Free agents, all with times of their own: a `tick` lets those that end their steps together be computed together.
CONDITIONS: dict[str, dict[str, Any]] = {
    "all awake": {},
    "half awake": {"participation": 0.5},
    "free": {"clock": {"compute": {"name": "uniform", "mean": 1.0, "per": "agent"}, "tick": 1.0, "mode": "free"}},
}


def huge(repeats: int, agents: int = 100_000, dim: int = 100) -> Iterator[Measure]:
    """Measure very many agents on a random 4-regular graph: start-up, memory, time per edge; one process each."""
    for name, conditions in CONDITIONS.items():
        measured = {}
        for count in (agents, 1000):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                measured[count] = pool.apply(_huge, (count, dim, conditions, repeats, torch.get_num_threads()))
        title = f"{agents:,} agents, {name}"
        (started, memory, seconds), few = measured[agents], measured[1000][2]
        yield Measure(f"{title}: seconds to start", [started], "< 60")
        yield Measure(f"{title}: memory, of the state", [memory], "< 2")
        yield Measure(f"{title}: time per edge, over 1,000 agents", [a / b for a, b in zip(seconds, few)], "< 1.5")


def million(repeats: int) -> Iterator[Measure]:
    """Measure a million agents with 10 parameters, all awake."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        started, memory, seconds = pool.apply(_huge, (1_000_000, 10, {}, repeats, torch.get_num_threads()))
    yield Measure("a million agents: seconds to start", [started], "< 600")
    yield Measure("a million agents: memory, of the state", [memory], "< 3")
    yield Measure("a million agents: seconds per round", [2_000_000 * s for s in seconds], "< 60")


def _huge(
    agents: int, dim: int, conditions: dict[str, Any], repeats: int, threads: int
) -> tuple[float, float, list[float]]:
    """Return seconds to start, peak memory over the state's, and seconds per round and edge."""
    torch.set_num_threads(threads)
    began = time.perf_counter()
    graph = graphs.regular(agents, 4)
    problem = problems.logistic(agents=agents, samples=1, dim=dim, dtype=torch.float32, execution="bmm")
    keep_freed_memory()  # only now: what building the problem has freed would hide what the run needs
    before = forget_peak()
    run = Rounds(methods.caden(mu_z=MU, solver=solvers.lbfgs(memory=5)), problem, graph, steps=2, **conditions)
    started = time.perf_counter() - began
    for _ in range(2):
        run()
    seconds = [run() / len(graph.edges) for _ in range(repeats)]
    state = sum(tensor.numel() * tensor.element_size() for tensor in run.run.flatten()[0].values())
    return started, (largest() - before) / state, seconds


def _many(kind: str, repeats: int, threads: int) -> list[Measure]:
    torch.set_num_threads(threads)
    keep_freed_memory()
    times: dict[int, list[float]] = {}
    measures = list[Measure]()
    for agents in (10_000, 1000, 100):  # the largest first, as memory is measured in a fresh process
        began = time.perf_counter()
        graph = graphs.ring(agents) if kind == "ring" else graphs.regular(agents, 4)
        before = forget_peak()
        problem = problems.logistic(agents=agents, samples=1, dim=1000, dtype=torch.float32, execution="bmm")
        run = Rounds(methods.caden(mu_z=MU), problem, graph)
        started = time.perf_counter() - began
        for _ in range(4):  # the system is slow to provide new memory
            run()
        times[agents] = [run() / len(graph.edges) for _ in range(repeats)]
        if not measures:
            needed = 4 * agents * 1000 * (4 + 2 * 10)  # x, phi, the neighbours' sum, gradient; the pairs
            measures.append(Measure(f"{kind}: seconds to start with 10,000 agents", [started], "< 10"))
            measures.append(Measure(f"{kind}: memory, of what the state needs", [(largest() - before) / needed], "< 2"))
    for least in (100, 1000):
        ratios = [a / b for a, b in zip(times[10_000], times[least])]
        measures.append(Measure(f"{kind}: time per edge, 10,000 over {least:,} agents", ratios, "< 1.5"))
    return measures
