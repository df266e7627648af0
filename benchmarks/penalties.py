"""Two refinements of CADEN's penalty that were tried: a weight per edge, and one penalty per layer.

    python benchmarks/penalties.py [--layers]

Edges: rounds until the gradient's sum and the distance from consensus have fallen by 1e9, for the best mu_z of 33, with
equal weights and with w_ij proportional to 1/sqrt(d_i d_j) (mean 1), on the quadratics of `benchmarks/auto.py`. This is
a textbook loop with exact local solves. Layers: CADEN on parameters scaled per layer is CADEN with a penalty per layer.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from auto import WARMUP, cases, hard_cases
from torch import Tensor

import caden
from caden import graphs, methods, problems
from caden.engine.warmup import start_point, warm_up


def rounds_to(H: Tensor, b: Tensor, edges: Tensor, weights: Tensor, mu: float, most: int = 600) -> int:
    """Return the rounds of CADEN in edge form with relax = 1/2."""
    (m, d), (i, j), W = b.shape, edges.T, mu * weights.unsqueeze(1)
    pull = b.new_zeros(m).index_add(0, i, W[:, 0]).index_add(0, j, W[:, 0])
    inverse = torch.linalg.inv(H + pull[:, None, None] * torch.eye(d, dtype=H.dtype))
    s, y = b.new_zeros(len(edges), d), b.new_zeros(len(edges), d)
    for k in range(most):
        right = -b
        right = right.index_add(0, i, W * s - y).index_add(0, j, W * s + y)
        x = (inverse @ right.unsqueeze(2)).squeeze(2)
        u, v = x[i] - s, x[j] - s
        s, y = s + (u + v) / 2, y + W * (u - v) / 2
        error = ((H @ x.unsqueeze(2)).squeeze(2) + b).sum(0).norm() ** 2 + (x - x.mean(0)).norm() ** 2
        if error < 1e-9 * b.sum(0).norm() ** 2:
            return k + 1
    return most


def compare_edges() -> None:
    print("| problem | equal weights | 1/sqrt(d_i d_j) | ratio |\n|---|---|---|---|")
    for case in [*list(cases(False))[:14], *list(hard_cases())[:4]]:
        H, b = case.problem.hessian, case.problem.linear
        edges, degree = torch.as_tensor(case.graph.edges), torch.as_tensor(case.graph.degrees, dtype=H.dtype)
        normalised = (degree[edges[:, 0]] * degree[edges[:, 1]]) ** -0.5
        L = float(torch.linalg.matrix_norm(H, 2).max() / degree.mean())
        grid = [L * g for g in np.logspace(-2, 1.2, 33)]
        weights = torch.ones_like(normalised), normalised / normalised.mean()
        equal, other = (min(rounds_to(H, b, edges, w, mu) for mu in grid) for w in weights)
        print(f"| {case.name} | {equal} | {other} | {other / equal:.2f} |", flush=True)


class Scaled(caden.Problem):
    """A problem in terms of u = x / scale."""

    def __init__(self, problem: caden.Problem, scale: Tensor, start: Tensor):
        self._problem, self._scale, self.start, self.execution = problem, scale, start / scale, problem.execution
        self.agents, self.dim, self.dtype, self.device = problem.agents, problem.dim, problem.dtype, problem.device

    def value_and_grad(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        value, gradient = self._problem.value_and_grad(x * self._scale, rows)
        return value, gradient * self._scale

    def evaluate(self, x: Tensor) -> dict[str, Tensor]:
        return self._problem.evaluate(x * self._scale)


def compare_layers() -> None:
    print("| digits network | second layer's penalty over the first's | rounds for the best mu_z |\n|---|---|---|")
    graph, skew = graphs.erdos_renyi(20, edges=37, seed=0), {"name": "dirichlet", "alpha": 0.3}
    for title, partition, target in (("iid", "iid", 0.93), ("2 classes each", "shards", 0.9), ("skewed", skew, 0.93)):
        problem = problems.PROBLEMS["classification"](partition=partition, execution="vmap")
        x, curvature = warm_up(problem, start_point(problem), WARMUP)
        for ratio in (0.25, 0.5, 1.0, 2.0, 4.0):
            scale = torch.cat([torch.full((n,), ratio ** (-i / 2)) for i, n in enumerate(problem.sizes)])
            best = 60
            for mu in np.logspace(-2.2, 0.2, 9) * float(curvature.max()) / 3.7:
                options = {"target": target, "stop_at_target": True, "progress": False}
                try:
                    run = caden.simulate(methods.caden(float(mu)), Scaled(problem, scale, x), graph, best, **options)
                except caden.RunError:
                    continue
                if run.stopped == "target":
                    best = min(best, int(run.rows[-1]["round"]))
            print(f"| {title} | {ratio:g} | {best} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", action="store_true", help="one penalty per layer instead of a weight per edge")
    compare_layers() if parser.parse_args().layers else compare_edges()


if __name__ == "__main__":
    main()
