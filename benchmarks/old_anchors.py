"""What if a slow agent's result counted although its anchors have moved while it computed?

    python benchmarks/old_anchors.py

Rounds with a deadline: some agents take several rounds for a step. `caden.Clock` lets such an agent solve with the
anchors of the round in which it is ready. Here the other rule is tried, too: it solves with the anchors that it had
when it began. CADEN in edges with exact solves on quadratics, agent by agent; the table shows the largest distance from
the minimiser after 600 rounds, relative to that at the start.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

import caden


def distance(old: bool, mu: float, relax: float, slow: int, share: float, rounds: int = 600, seed: int = 0) -> float:
    """Return the relative distance from the minimiser; infinite if it grows beyond a million."""
    problem, graph = caden.problems.quadratic(agents=10, dim=4, seed=seed), caden.graphs.erdos_renyi(10, 0.4, seed=seed)
    hessian, linear, solution = (part.numpy() for part in (problem.hessian, problem.linear, problem.solution))
    takes = np.where(np.arange(10) < share * 10, slow, 1)  # rounds for a step
    edges = [tuple(edge) for edge in graph.edges.tolist()]
    x, s, y = np.zeros((10, 4)), {e: np.zeros(4) for e in edges}, {e: np.zeros(4) for e in edges}
    seen = [dict(s) for _ in range(10)], [dict(y) for _ in range(10)]  # what an agent knew when it began
    for round in range(rounds):
        ready = (round + 1) % takes == 0
        new = x.copy()
        for i in np.flatnonzero(ready):
            anchors, duals = (seen[0][i], seen[1][i]) if old else (s, y)
            mine = [e for e in edges if i in e]
            pull = sum(mu * anchors[e] - duals[e] * (1 if e[0] == i else -1) for e in mine)
            new[i] = np.linalg.solve(hessian[i] + mu * len(mine) * np.eye(4), linear[i] + pull)
        for e in edges:
            first, second = ((new[i] - s[e]) * ready[i] for i in e)
            s[e], y[e] = s[e] + relax * (first + second), y[e] + relax * mu * (first - second)
        x = new
        for i in np.flatnonzero(ready):
            seen[0][i], seen[1][i] = dict(s), dict(y)
        error = float(np.abs(x - solution).max() / np.abs(solution).max())
        if not error < 1e6:
            return np.inf
    return error


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("| relax | mu_z | slow agents | anchors when ready | anchors when begun |\n|---|---|---|---|---|")
    for relax, mu, (slow, share) in itertools.product((0.5, 0.9), (0.1, 0.3, 1.0), ((2, 0.3), (5, 0.3), (3, 1.0))):
        errors = [distance(old, mu, relax, slow, share) for old in (False, True)]
        texts = ["diverges" if np.isinf(e) else f"{e:.0e}" for e in errors]
        print(f"| {relax} | {mu} | {share:.0%}, {slow} rounds | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
