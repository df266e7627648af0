"""How close one CADEN round on the full MNIST problem comes to the machine's matrix-multiplication speed.

    python benchmarks/round.py [--repeats 8] [--no-carry]

The round's necessary floating-point operations are 5 gradients x 4 x 60,000 samples x 101,632 parameters. They are
divided by the time of a round (and by that of its gradients alone), and by the speed of a plain large product timed in
the same process, alternating with the rounds. The data are random numbers of MNIST's shape: speed does not depend on
them, and nothing needs to be fetched.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import caden
from caden.network import Stacked
from caden.schedules import Draw

AGENTS, SAMPLES, STEPS, SIZE = 20, 60_000, 5, 3000


class Clocked:
    """A problem that adds up the time and the number of its gradients."""

    def __init__(self, problem):
        self._problem, self.seconds, self.gradients = problem, 0.0, 0

    def value_and_grad(self, x, rows=None):
        began = time.perf_counter()
        found = self._problem.value_and_grad(x, rows)
        self.seconds += time.perf_counter() - began
        self.gradients += len(x)
        return found

    def __getattr__(self, name):
        return getattr(self._problem, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--no-carry", action="store_true", help="drop the L-BFGS memory after each round")
    options = parser.parse_args()
    caden.parallel.keep_freed_memory()

    torch.manual_seed(0)
    data = (torch.randn(SAMPLES, 1, 28, 28), torch.randint(10, (SAMPLES,)))
    model = caden.problems.mlp(784, 10, hidden=128)
    problem = Clocked(caden.problems.classification(model, data, agents=AGENTS, batching="loop"))
    graph = caden.graphs.erdos_renyi(AGENTS, 0.2, edges=37)
    method = caden.methods.caden(mu_z=0.1, solver=caden.solvers.lbfgs(carry=not options.no_carry))
    network = Stacked(graph, problem, Draw(0, AGENTS), may_sleep=False)
    awake, work = torch.ones(AGENTS, dtype=torch.bool), torch.full((AGENTS,), STEPS)
    state = method.init(problem.start.expand(AGENTS, -1).contiguous(), network.round(-1, awake, work, problem))
    for index in range(3):  # fill the memory, warm the caches
        state, _ = method.step(state, network.round(index, awake, work, problem))

    def products(i: int) -> None:
        """The two large products of one agent's gradient and nothing else: what bounds any implementation."""
        inputs = problem.shards[i][0].flatten(1)
        hidden = torch.mm(inputs, state.x[i, : 784 * 128].view(128, 784).mT)
        torch.mm(hidden.mT, inputs)

    a, b, c = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), torch.empty(SIZE, SIZE)
    torch.mm(a, b, out=c)
    product, whole, alone, bound = [], [], [], []
    for index in range(3, 3 + options.repeats):
        began = time.perf_counter()
        torch.mm(a, b, out=c)
        speed = 2 * SIZE**3 / (time.perf_counter() - began)
        problem.seconds, problem.gradients = 0.0, 0
        began = time.perf_counter()
        state, _ = method.step(state, network.round(index, awake, work, problem))
        seconds = time.perf_counter() - began
        needed = STEPS * 4 * SAMPLES * problem.dim
        done = problem.gradients / AGENTS * 4 * SAMPLES * problem.dim  # rejected trials included
        began = time.perf_counter()
        caden.parallel.each(products, range(AGENTS))
        bound.append(4 * SAMPLES * 784 * 128 / (time.perf_counter() - began) / speed)
        product.append(speed)
        whole.append(needed / seconds / speed)
        alone.append(done / problem.seconds / speed)
        print(
            f"round {index}: {seconds:.2f} s, gradients {problem.seconds:.2f} s, "
            f"{problem.gradients - STEPS * AGENTS} rejected, round/product {whole[-1]:.2f}"
        )
    print(f"threads {torch.get_num_threads()}, product {statistics.median(product) / 1e9:.0f} GFLOP/s (median)")
    kinds = (("round", whole), ("its gradients alone", alone), ("the two products of a gradient alone", bound))
    for name, values in kinds:
        print(f"{name}: {statistics.median(values):.2f} of the product's speed (best {max(values):.2f})")


if __name__ == "__main__":
    main()
