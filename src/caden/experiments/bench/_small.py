"""Small problems: against handwritten loops of PyTorch, and compiled loops against torch alone."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, softplus

from caden import graphs, methods, problems, solvers
from caden._tensor import compiled
from caden.core import Problem
from caden.engine.warmup import start_point
from caden.errors import RunError
from caden.experiments.bench._measure import MU, STEPS, Measure, Rounds
from caden.graphs import Graph


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
