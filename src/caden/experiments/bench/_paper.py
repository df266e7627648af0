"""CADEN's gradients and rounds at the paper's size, against the machine's limit."""

import time
from collections.abc import Iterator

import torch

from caden import graphs, methods, problems, solvers
from caden._tensor import parallel
from caden.experiments.bench._measure import MU, STEPS, Measure, Rounds

SIDE = 3000  # of the large matrix product that represents the machine's limit


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
