"""Compare mu_z = "auto" with the best of a 12-point logarithmic grid from 1e-3 to 10 times L / (mean degree).

    python benchmarks/auto.py [--mnist | --hard]

It counts the rounds to a fixed target. The goal is a ratio of 1.5 (networks: 2).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import caden
from caden import data, graphs, methods, problems, theory
from caden.engine.warmup import start_point, warm_up

WARMUP = {"steps": 20, "step_size": 0.1}
LIKELY_FIRST = [6, 5, 7, 8, 4, 9, 3, 2, 10, 1, 0, 11]  # the best so far limits the rounds of the others


class Case(NamedTuple):
    name: str
    problem: Any
    graph: graphs.Graph
    target: float | None = None  # accuracy; if None, the relative error must fall by 1e9
    most: int = 800


def odd_digits(partition: str | dict[str, Any]) -> Any:
    """Return logistic regression on whether a digit is odd."""
    (x, y), _ = data.load("digits")
    x, y = np.asarray(x, float).reshape(len(x), -1), np.asarray(y)
    parts = data.partition_from_spec(partition, y, 20, 0)
    return problems.logistic(features=[x[part] for part in parts], labels=[y[part] % 2 for part in parts], l2=0.01)


def cases(mnist: bool) -> Iterator[Case]:
    er = graphs.erdos_renyi(20, edges=37, seed=0)
    rng = np.random.default_rng(5)
    for i in range(14):
        m, d, condition = int(rng.integers(6, 30)), int(rng.integers(2, 20)), 10 ** rng.uniform(0.5, 2.5)
        kinds = (
            graphs.erdos_renyi(m, edges=min(int(1.8 * m), m * (m - 1) // 2), seed=i),
            graphs.ring(m),
            graphs.small_world(m, 4, 0.2, seed=i),
            graphs.star(m),
            graphs.complete(m),
        )
        graph, problem = kinds[int(rng.integers(0, 5))], problems.quadratic(m, d, seed=i, condition=condition)
        if i % 3 == 0:  # nearly the same function at all agents
            problem = problems.quadratics(
                *(0.1 * part + 0.9 * part.mean(0, keepdim=True) for part in (problem.hessian, problem.linear))
            )
        alike = ", alike" if i % 3 == 0 else ""
        yield Case(f"quadratic, {m} agents, d = {d}, condition {condition:.0f}{alike}, {graph.name}", problem, graph)
    yield Case("logistic, odd digits, iid", odd_digits("iid"), er)
    yield Case("logistic, odd digits, Dirichlet 0.3", odd_digits({"name": "dirichlet", "alpha": 0.3}), er)
    make = problems.PROBLEMS["classification"]
    for title, partition, target in (("iid", "iid", 0.93), ("2 classes each", "shards", 0.9)):
        yield Case(f"digits network, {title}", make(partition=partition, execution="vmap"), er, target, 100)
    skew = {"name": "dirichlet", "alpha": 0.3}
    yield Case("digits network, Dirichlet 0.3", make(partition=skew, execution="vmap"), er, 0.93, 100)
    for name, target in (("mnist", 0.93), ("fashion_mnist", 0.83)) if mnist else ():
        yield Case(f"{name}, iid", make(data=name), er, target, 15)
        yield Case(f"{name}, Dirichlet 0.3", make(data=name, partition=skew), er, target, 30)


def hard_cases() -> Iterator[Case]:
    """Yield graphs with a small gap, and problems of other kinds: robust, badly scaled, sparse, a small network."""
    clique = [(i, j) for i in range(6) for j in range(i)]
    barbell = clique + [(i + 6, j + 6) for i, j in clique] + [(0, 6)]
    named = {
        "path of 30": graphs.path(30),
        "ring of 30": graphs.ring(30),
        "star of 30": graphs.star(30),
        "barbell of 12": graphs.from_edges(barbell),
    }
    for title, graph in named.items():
        yield Case(f"quadratic, {title}", problems.quadratic(graph.agents, 8, seed=3, condition=20.0), graph, most=3000)
    graph, rng = graphs.erdos_renyi(12, edges=20, seed=0), np.random.default_rng(1)
    A, noise = rng.normal(size=(12, 30, 8)), rng.standard_t(1.5, size=(12, 30))
    scales = np.where(np.arange(8) < 4, 1.0, 100.0)
    truth = rng.normal(size=8)

    def regression(features: np.ndarray, residuals: Any) -> Any:
        data = [(torch.tensor(a), torch.tensor(a @ truth + e)) for a, e in zip(features, noise)]
        return problems.functions([lambda x, a=a, b=b: residuals(a @ x - b) for a, b in data], 8)

    yield Case("pseudo-Huber", regression(A, lambda r: ((1 + r**2).sqrt() - 1).mean()), graph, most=3000)
    yield Case("least squares, scales x 100", regression(A * scales, lambda r: r.square().mean()), graph, most=3000)
    sparse = A * (rng.random(A.shape) < 0.2)
    yield Case("sparse least squares", regression(sparse, lambda r: r.square().mean()), graph, most=3000)

    def network(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hidden, out = x[:32].view(8, 4), x[32:]
        return ((a @ hidden).tanh() @ out - b).square().mean() + 0.005 * x.square().sum()

    data = [(torch.tensor(a), torch.tensor(np.tanh(a @ truth))) for a in A]
    tanh = [lambda x, a=a, b=b: network(x, a, b) for a, b in data]
    small = problems.functions(tanh, 36)
    small.start = torch.tensor(rng.normal(size=36) / 2)
    yield Case("tanh network 8-4-1", small, graph, most=3000)


def rounds_to(case: Case, mu_z: float | str, most: int, tolerance: float) -> int | None:
    """Return the rounds to the target, or None if it is not reached."""
    goal = {"tolerance": tolerance} if case.target is None else {"target": case.target, "stop_at_target": True}
    warmup = None if case.target is None else WARMUP
    try:
        result = caden.simulate(
            methods.caden(mu_z), case.problem, case.graph, most, warmup=warmup, progress=False, **goal
        )
    except caden.RunError:
        return None
    return int(result.history["round"].iloc[-1]) if result.stopped in ("target", "tolerance") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnist", action="store_true", help="also run MNIST and Fashion-MNIST")
    parser.add_argument("--hard", action="store_true", help="run harder graphs and other kinds of problems instead")
    print("| problem | best of the grid | at, in L / (mean degree) | auto | ratio |\n|---|---|---|---|---|")
    options = parser.parse_args()
    for case in hard_cases() if options.hard else cases(options.mnist):
        x = start_point(case.problem, None)
        if case.target is None:
            L = float(theory.smoothness(case.problem, x).max())
        else:
            x, curvature = warm_up(case.problem, x, WARMUP)
            L = float(curvature.max())
        tolerance = 1e-9 * float(case.problem.value_and_grad(x)[1].sum(0).norm() ** 2)
        grid, best, where = np.logspace(-3, 1, 12), case.most, None
        for i in LIKELY_FIRST:
            rounds = rounds_to(case, float(grid[i] * L / case.graph.degrees.mean()), best, tolerance)
            if rounds is not None and (rounds < best or where is None):
                best, where = rounds, grid[i]
        auto = rounds_to(case, "auto", max(4 * best, 400), tolerance)
        ratio = "-" if auto is None else f"{auto / best:.2f}"
        print(f"| {case.name} | {best} | {'-' if where is None else f'{where:.2g}'} | {auto} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
