"""Check whether each method reaches the minimiser of a strongly convex problem, also with sleeping agents and loss.

The problem: 12 random quadratics of condition 10 in 4 dimensions, a random graph with 20 edges, 3 local steps. The
result is the largest distance of any agent from the centralised minimiser, relative to its norm, after 2,000 rounds, or
8,000 with a fifth of the agents awake, where every method is slower.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from caden import graphs, problems
from caden.engine.simulate import simulate
from caden.errors import CadenError, RunError
from caden.methods import CARDS, METHODS

SETTINGS: dict[str, dict[str, Any]] = {
    "all awake": {},
    "half awake": {"participation": 0.5},
    "a fifth awake": {"participation": 0.2},
    "half the links": {"links": 0.5},
    "20 % lost": {"messages": {"loss": 0.2}},
    "2 rounds late": {"messages": {"delay": 2}},
    "lost, late, half awake": {"messages": {"loss": 0.2, "delay": 2}, "participation": 0.5},
    "half the entries": {"messages": {"top": 0.5}},
}
EXACT = 1e-6


def distance(name: str, rounds: int = 2000, **options: Any) -> float | str:
    """Return the distance of the worst agent after `rounds` rounds, or why there is none."""
    problem, graph = problems.quadratic(agents=12, dim=4, seed=2), graphs.erdos_renyi(12, edges=20, seed=3)
    try:
        method = METHODS[name](**CARDS[name].unit_parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a method does not tolerate is what is measured here
            options |= {"local_steps": 3, "record_every": rounds, "progress": False}
            result = simulate(method, problem, graph, rounds, **options)
    except CadenError:
        return "refused"
    except RunError:
        return "diverged"
    away = torch.linalg.vector_norm(result.x - problem.solution, dim=1).max() / problem.solution.norm()
    return float(away)


def measure_methods(names: list[str], rounds: int = 2000) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Yield each method with its distance in each setting."""
    for name in names:
        row = {}
        for setting, options in SETTINGS.items():
            factor = 4 if options.get("participation", 1.0) < 0.5 else 1
            row[setting] = distance(name, factor * rounds, **options)
        yield name, row


def verdict(value: float | str) -> str:
    """Return a distance as text: exact or biased, with the distance."""
    if isinstance(value, str):
        return value
    return f"exact ({value:.0e})" if value < EXACT else f"biased ({value:.1g})"
