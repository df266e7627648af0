"""Measure the speed of this library on this machine, as ratios of times taken alternately in one process.

Absolute times mean little on shared machines. The ratio of two times taken one right after the other, repeatedly,
depends on the code. Every comparison with another implementation first passes a gate: the results must agree.
"""

import copy
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, softplus

from caden import draws, graphs, methods, problems, solvers
from caden._tensor import compiled, parallel
from caden._tensor.memory import keep_freed_memory
from caden.core import Method, Problem
from caden.engine.options import Conditions
from caden.engine.run_directory import environment
from caden.engine.simulate import prepare
from caden.engine.warmup import start_point
from caden.errors import RunError
from caden.experiments.forecast import forget_peak, largest
from caden.graphs import Graph

STEPS, MU = 5, 0.1
SIDE = 3000  # of the large matrix product that represents the machine's limit


class Measure(NamedTuple):
    """A ratio, measured several times."""

    name: str
    ratios: list[float]
    goal: str  # "> 0.85": above is good; "< 1.05": below is

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool:
        sign, bound = self.goal.split()
        return self.median >= float(bound) if sign == ">" else self.median <= float(bound)


class Rounds:
    """A method in the middle of a run; a call runs one more round and returns its seconds."""

    def __init__(
        self,
        method: Method,
        problem: Problem,
        graph: Graph,
        x0: Tensor | None = None,
        steps: int = STEPS,
        **conditions: Any,
    ):
        self.run, start = prepare(method, problem, graph, Conditions(local_steps=steps, **conditions), x0=x0)
        self.run.begin(start)

    def __call__(self) -> float:
        before = self.run.seconds
        self.run.step()
        return self.run.seconds - before

    @property
    def x(self) -> Tensor:
        return self.run.state.x  # type: ignore[no-any-return]


def paper(repeats: int) -> Iterator[Measure]:
    """Measure at the paper's size: 20 agents with 3,000 samples each, 784-128-10 (random data of MNIST's shape)."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(60_000, 784, generator=generator), torch.randint(10, (60_000,), generator=generator)
    problem = problems.classification(problems.mlp(784, 10), data, agents=20, execution="loop")
    graph = graphs.erdos_renyi(20, 0.2, edges=37)
    flops = 4 * 60_000 * problem.dim  # two products per layer, forward and backward; the inputs need no gradient
    a, b, c = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.empty(SIDE, SIDE)
    layer, hidden = torch.randn(128, 784), torch.randn(3000, 128)
    gradients, against_products, rounds = list[float](), list[float](), list[float]()
    overhead = dict[bool, list[float]]()

    def products(agent: int) -> None:
        """Compute only the two large products of an agent's gradient."""
        inputs = problem.batch(agent)[0]
        torch.mm(inputs, layer.T), torch.mm(hidden.T, inputs)

    for carry in (True, False):
        run = Rounds(methods.caden(mu_z=MU, solver=solvers.lbfgs(carry=carry)), problem, graph)
        clocked = run.run.problem
        for _ in range(3):  # fill the memory, warm the caches
            run()
        for _ in range(repeats):
            began = time.perf_counter()
            torch.mm(a, b, out=c)
            limit = 2 * SIDE**3 / (time.perf_counter() - began)
            began = time.perf_counter()
            parallel.run_in_threads(products, range(20))
            narrow = 4 * 60_000 * layer.numel() / (time.perf_counter() - began)
            clocked.forget()
            seconds = run()
            speed = clocked.gradients / 20 * flops / clocked.seconds
            gradients.append(speed / limit)
            against_products.append(speed / narrow)
            overhead.setdefault(carry, []).append(1 - clocked.seconds / seconds)
            if carry:
                rounds.append(STEPS * flops / seconds / limit)
    yield Measure("paper: gradients, of the speed of a large product", gradients, "> 0.85")
    yield Measure("paper: gradients, of the speed of their two large products alone", against_products, "> 0.85")
    yield Measure("paper: a whole round, of the speed of a large product", rounds, "> 0.7")
    yield Measure("paper: share of a round that is not gradients, memory dropped", overhead[False], "< 0.1")
    yield Measure("paper: the same, memory 10 carried", overhead[True], "< 0.15")


class Case(NamedTuple):
    """A problem in two forms: a problem of this library, and one function per agent for autograd."""

    problem: Problem
    losses: list[Callable[[Tensor], Tensor]]


def _logistic(agents: int, samples: int, dim: int) -> Case:
    problem = problems.logistic(agents=agents, samples=samples, dim=dim, alpha=0.0, l2=0.01)

    def loss(data: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: softplus(-data @ x).mean() + 0.005 * x @ x

    return Case(problem, [loss(data) for data in problem.signed])


def _network(agents: int, samples: int, inputs: int, hidden: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    count = agents * samples
    data = torch.randn(count, inputs, generator=generator), torch.randint(10, (count,), generator=generator)
    model = problems.mlp(inputs, 10, hidden)
    problem = problems.classification(model, data, agents=agents)

    def loss(shard: tuple[Tensor, Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: cross_entropy(functional_call(model, problem.model.views(x), (shard[0],)), shard[1])

    return Case(problem, [loss(problem.batch(agent)) for agent in range(agents)])


CASES: dict[str, tuple[Callable[..., Case], tuple[int, ...], str]] = {
    "logistic 20x10x50": (_logistic, (20, 10, 50), "> 30"),
    "logistic 100x10x3": (_logistic, (100, 10, 3), "> 10"),
    "logistic 200x10x200": (_logistic, (200, 10, 200), "> 10"),
    "logistic 20x600x784": (_logistic, (20, 600, 784), "> 0.95"),
    "network 20x600, 784-64-10": (_network, (20, 600, 784, 64), "> 0.95"),
}


class _ByHand:
    """A handwritten baseline: one torch optimizer per agent in a Python loop, inside a CADEN round."""

    def __init__(self, case: Case, graph: Graph, optimizer: Callable[..., torch.optim.Optimizer], calls: int):
        self.losses, self.calls = case.losses, calls
        self.near = [graph.neighbours(i) for i in range(graph.agents)]
        self.x = [row.clone().requires_grad_() for row in start_point(case.problem)]
        self.phi, self.sent = [torch.zeros_like(v) for v in self.x], [v.detach().clone() for v in self.x]
        self.optimizers = [optimizer([v]) for v in self.x]

    def __call__(self) -> float:
        began = time.perf_counter()
        for i, v in enumerate(self.x):
            anchor = (self.sent[i] + sum(self.sent[j] for j in self.near[i]) / len(self.near[i])) / 2
            for _ in range(self.calls):
                self.optimizers[i].step(lambda i=i, v=v, anchor=anchor: self._closure(i, v, anchor))  # type: ignore
        self.sent = [v.detach().clone() for v in self.x]
        for i, near in enumerate(self.near):
            self.phi[i] += MU / 2 * (len(near) * self.sent[i] - sum(self.sent[j] for j in near))
        return time.perf_counter() - began

    def _closure(self, i: int, v: Tensor, anchor: Tensor) -> Tensor:
        self.optimizers[i].zero_grad()
        gap = v - anchor
        loss: Tensor = self.losses[i](v) + self.phi[i] @ v + MU * len(self.near[i]) / 2 * (gap @ gap)
        torch.autograd.backward(loss)
        return loss

    def rows(self) -> Tensor:
        return torch.stack(self.sent)


def _lbfgs(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return L-BFGS without early stopping, with as many evaluations per round as this library."""
    return torch.optim.LBFGS(parameters, max_iter=STEPS, history_size=10, tolerance_grad=0, tolerance_change=0)


def small(repeats: int) -> Iterator[Measure]:
    """Compare with a loop over 20 (100, 200) torch.optim.LBFGS objects."""
    for name, (make, size, goal) in CASES.items():
        case = make(*size)
        graph = graphs.ring(size[0])
        _gate(name, case, graph)
        library = Rounds(methods.caden(mu_z=MU), case.problem, graph)
        loop = _ByHand(case, graph, _lbfgs, 1)
        for _ in range(3):
            library(), loop()
        ratios = [sum(loop() for _ in range(3)) / sum(library() for _ in range(3)) for _ in range(repeats)]
        yield Measure(f"{name}: times faster than a loop", ratios, goal)


def against_torch(repeats: int) -> Iterator[Measure]:
    """Compare rounds of CADEN in compiled loops with the same rounds by torch alone; the iterates must agree."""
    cases = {
        "quadratic 16x6, 20 local steps": (problems.quadratic(agents=16, dim=6), 20),
        "logistic 20x10x50": (_logistic(20, 10, 50).problem, STEPS),
    }
    for name, (problem, steps) in cases.items():
        fast, slow = (Rounds(methods.caden(mu_z=MU), problem, graphs.ring(problem.agents), steps=steps) for _ in "ab")

        def pair(fast: Rounds = fast, slow: Rounds = slow) -> float:
            quick = fast()
            with compiled.left_to_torch():
                return slow() / quick

        for _ in range(3):
            pair()
        if not torch.allclose(fast.x, slow.x, rtol=1e-8, atol=1e-10):
            raise RunError(f"{name}: the iterates of compiled loops differ from those of torch.")
        ratios = [statistics.median(pair() for _ in range(5)) for _ in range(repeats)]
        yield Measure(f"{name}: times faster than without compiled loops", ratios, "> 8")


def _gate(name: str, case: Case, graph: Graph) -> None:
    """Check the iterates of gradient descent and, as the first step of L-BFGS differs, its objective only."""
    step = 0.05
    descent = Rounds(methods.caden(mu_z=MU, solver=solvers.gd(step)), case.problem, graph)
    descent_loop = _ByHand(case, graph, lambda v: torch.optim.SGD(v, lr=step), STEPS)
    for _ in range(3):
        descent(), descent_loop()
    difference = float((descent.x - descent_loop.rows()).abs().max())
    if not difference < (1e-9 if case.problem.dtype == torch.float64 else 1e-4):
        raise RunError(f"{name}: gradient descent differs from the loop by {difference:.1e}.")
    library = Rounds(methods.caden(mu_z=MU), case.problem, graph)
    loop = _ByHand(case, graph, _lbfgs, 1)
    for _ in range(10):
        library(), loop()
    values = [float(case.problem.value_and_grad(rows)[0].sum()) for rows in (library.x, loop.rows())]
    if not values[0] <= 1.01 * values[1] + 1e-9:
        raise RunError(f"{name}: the objective is {values[0]:.6g}, that of the loop {values[1]:.6g}.")


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


class PlainLoops:
    """A training loop per agent as one would write it; a call runs the steps of one round and returns its seconds."""

    def __init__(self, model: torch.nn.Module, problem: problems.Module, size: int):
        self._problem, self._size = problem, size
        self._models = [copy.deepcopy(model) for _ in range(problem.agents)]
        self._optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in self._models]

    def __call__(self, round: int) -> float:
        began = time.perf_counter()
        for agent, (model, optimizer) in enumerate(zip(self._models, self._optimizers)):
            inputs, targets = self._problem.shards[agent].read(slice(None))
            for step in range(STEPS):
                chosen = draws.batch(0, round, step, agent, len(targets), self._size)
                output = model(inputs[chosen])
                loss = cross_entropy(output.flatten(0, -2), targets[chosen].flatten())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return time.perf_counter() - began


def networks(repeats: int) -> Iterator[Measure]:
    """Measure a round of CADEN with AdamW against plain loops that train the same models one after another."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3000, 1, 28, 28, generator=generator), torch.randint(10, (3000,), generator=generator)
    tokens = torch.randint(90, (800, 65), generator=generator)
    cases = {
        "CNN": (problems.cnn(1, 28, 10), images, 10, 32),
        "transformer": (problems.transformer(90, 64), (tokens[:, :-1], tokens[:, 1:]), 4, 16),
    }
    for name, (model, data, agents, size) in cases.items():
        problem = problems.classification(model, data, agents=agents, batch_size=size)
        solver = solvers.torch_optim(torch.optim.AdamW, lr=1e-3)
        run = Rounds(methods.caden(mu_z=MU, solver=solver), problem, graphs.ring(agents))
        plain = PlainLoops(model, problem, size)
        run(), plain(0)
        ratios = [run() / plain(round) for round in range(1, repeats + 1)]
        yield Measure(f"networks: a round, over plain loops, {name}", ratios, "< 1.15")


PARTS: dict[str, Callable[[int], Iterator[Measure]]] = {
    "many": many,
    "million": million,
    "networks": networks,
    "paper": paper,
    "small": lambda repeats: chain(small(repeats), against_torch(repeats) if compiled.installed() else ()),
}


def run(parts: list[str], repeats: int) -> Iterator[Measure]:
    """Yield the measures of some parts, one part after the other."""
    keep_freed_memory()
    for part in parts:
        yield from PARTS[part](repeats)


def remember(file: Path, measures: list[Measure]) -> dict[str, float]:
    """Append the measures to a history file; return the previous median of each."""
    last: dict[str, float] = {}
    if file.exists():
        for line in file.read_text().splitlines():
            last |= {name: statistics.median(ratios) for name, ratios in json.loads(line)["ratios"].items()}
    entry = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        **environment(),
    }
    entry["ratios"] = {m.name: m.ratios for m in measures}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(entry) + "\n")
    return last
