"""Does each method reach the minimiser? On one strongly convex problem, with everyone awake, with sleepers, with loss.

12 random quadratics of condition 10 in 4 dimensions, a random graph with 20 edges, 3 local steps. The answer is the
largest distance of any agent from the centralised minimiser, relative to its norm, after 2,000 rounds, or 8,000 with a
fifth awake, where everything is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from caden import graphs, methods, problems
from caden.errors import CadenError, RunError
from caden.run import simulate

# Parameters that suit this problem, whose curvature is 1.
PARAMETERS: dict[str, dict[str, Any]] = {
    "accelerated": {"method": {"name": "caden", "mu_z": 0.4, "solver": "exact"}},
    "adapd": {"eta": 2.0, "solver": "exact"},
    "admm_edges": {"mu_z": 0.4},
    "c2eden": {"alpha": 0.5},
    "caden": {"mu_z": 0.4, "solver": "exact"},
    "caden_gd": {"mu_z": 0.4},
    "d2": {"alpha": 0.5},
    "dgd": {"alpha": 0.1},
    "diging": {"alpha": 0.2},
    "dino": {"tolerance": 1e-12},
    "dinno": {"rho": 0.2, "growth": 1.0, "solver": "exact"},
    "dlm": {"c": 0.2, "rho": 1.0},
    "druid": {"mu_z": 0.4, "step": "newton", "eps": 0.2},
    "esom": {"alpha": 1.0, "eps": 0.5},
    "exact_diffusion": {"alpha": 0.5},
    "extra": {"alpha": 0.5},
    "fedadmm": {"rho": 0.3, "solver": "exact"},
    "fedavg": {"alpha": 0.2},
    "gt": {"alpha": 0.3},
    "gt_lbfgs": {"alpha": 0.1, "eps": 0.3},
    "kgt": {"alpha": 0.1},
    "led": {"alpha": 0.3, "beta": 0.3},
    "lt_admm": {"gamma": 0.2, "beta": 0.1, "rho": 0.4},
    "network_newton": {"alpha": 0.1},
    "newton_tracking": {"alpha": 0.5, "eps": 0.5},
    "nids": {"alpha": 0.5},
    "prox_diffusion": {"alpha": 0.5, "l1": 0.0},
    "proxskip": {"alpha": 0.5, "p": 0.5},
    "radmm": {"rho": 0.4, "alpha": 0.7, "solver": "exact"},
    "scaffold": {"alpha": 0.3},
    "tutunov": {},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "all awake": {},
    "half awake": {"participation": 0.5},
    "a fifth awake": {"participation": 0.2},
    "half the links": {"links": 0.5},
    "20 % lost": {"messages": {"loss": 0.2}},
    "half the entries": {"messages": {"top": 0.5}},
}
EXACT = 1e-6


def distance(name: str, rounds: int = 2000, **options: Any) -> float | str:
    """Distance of the worst agent after `rounds` rounds, or why there is none."""
    problem, graph = problems.quadratic(agents=12, dim=4, seed=2), graphs.erdos_renyi(12, edges=20, seed=3)
    factory: Callable[..., Any] = methods.METHODS[name]
    try:
        method = factory(**PARAMETERS[name])
        result = simulate(method, problem, graph, rounds, local_steps=3, record_every=rounds, progress=False, **options)
    except CadenError:
        return "refused"
    except RunError:
        return "diverged"
    away = torch.linalg.vector_norm(result.x - problem.solution, dim=1).max() / problem.solution.norm()
    return float(away)


def check(names: list[str], rounds: int = 2000) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Each method's distance in each setting."""
    for name in names:
        row = {}
        for setting, options in SETTINGS.items():
            slow = 4 if options.get("participation", 1.0) < 0.5 else 1
            row[setting] = distance(name, slow * rounds, **options)
        yield name, row


def verdict(value: float | str) -> str:
    """A distance as text: exact, or biased with the distance."""
    if isinstance(value, str):
        return value
    return f"exact ({value:.0e})" if value < EXACT else f"biased ({value:.1g})"
