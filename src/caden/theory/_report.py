"""All theoretical results for one experiment, as plain data; `caden theory` prints them."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caden import solvers
from caden.core import Problem
from caden.curvature import curvature_bound, hessians, paper_estimate
from caden.graphs import Graph
from caden.theory._doctor import DENSE, examine
from caden.theory._paper import Facts, constants, corollary1, theorem1
from caden.theory._rate import local_rate
from caden.theory._stability import best_parameters, dual_limit, sampled_radius, spectral_radius

_FLAT = (1.0, 0.1, 0.01)  # curvatures, in units of L, of the model with every H_i = h I


def report(
    problem: Problem,
    graph: Graph,
    x: Tensor,
    mu_z: float,
    mu_y: float | None = None,
    relax: float = 0.5,
    participation: np.ndarray | float = 1.0,
    tau: int = 5,
) -> dict[str, Any]:
    """Return facts about the graph, the problem at x (m, d) and CADEN's parameters, as tables of numbers."""
    step_y = mu_z if mu_y is None else mu_y
    p_min = float(np.min(participation))
    rho = mu_z * torch.from_numpy(graph.degrees.copy()).to(x).unsqueeze(1)
    rates = {
        "lbfgs": local_rate(problem, x, rho, solvers.lbfgs(), tau),
        "gd": local_rate(problem, x, rho, solvers.gd(), tau),
    }
    L = float(curvature_bound(problem, x).max())
    facts = Facts.of(graph, L, mu_z, step_y, p_min, min(rates["lbfgs"], 1 - 1e-9), tau)
    low, high = graph.spectrum
    verdict = examine(problem, graph, mu_z, step_y, relax, p_min < 1, near_exact=True)
    tables: dict[str, Any] = {
        "graph": {
            "agents": graph.agents,
            "edges": len(graph.edges),
            "d_max": int(graph.degrees.max()),
            "lambda_min": low,
            "lambda_max": high,
            "e_max": graph.normalised_spectrum[1],
        },
        "curvature": {"L by Hessian products": L, "L by the paper's estimator": paper_estimate(problem, x)},
        "local rate r": rates,
        "parameters": {"mu_z": mu_z, "mu_y": step_y, "relax": relax, "p_min": p_min, "tau": tau},
        "theorem 1": theorem1(facts),
        "corollary 1": corollary1(graph, L, p_min, min(rates["lbfgs"], 1 - 1e-9)),
        "stability": {
            "largest mu_y where f is flat": mu_z * dual_limit(graph, relax),
            "verdict": verdict.refusal or verdict.warning or "no problem found with these parameters",
        },
    }
    for version in ("printed", "derived"):
        computed = constants(facts, version)
        tables[f"constants, {version}"] = computed._asdict() | {"bound follows": computed.bound_follows}
    tables["rate"] = _rate(problem, graph, x, L, mu_z, step_y, relax, participation)
    tables["recommended"] = _recommend(problem, graph, x, L)
    return tables


def _hessians(problem: Problem, x: Tensor) -> np.ndarray | None:
    """Return the Hessians (m, d, d) at the mean of x, or None if the one-round operator would be too large."""
    if problem.agents * problem.dim > DENSE:
        return None
    mean = x.mean(0).expand_as(x).contiguous()
    return np.asarray(hessians(problem, mean).double().cpu().numpy())


def _rate(
    problem: Problem,
    graph: Graph,
    x: Tensor,
    L: float,
    mu_z: float,
    mu_y: float,
    relax: float,
    participation: np.ndarray | float,
) -> dict[str, Any]:
    """Return the predicted factor per round and the rounds per decimal digit."""
    H, table = _hessians(problem, x), {}
    models = {"linearised here": H} if H is not None else {}
    if H is None and graph.agents <= DENSE:
        models = {f"every H_i = {f:g} L": f * L * np.ones((graph.agents, 1, 1)) for f in _FLAT}
    for name, model in models.items():
        if float(np.min(participation)) < 1:
            radius = sampled_radius(model, graph, mu_z, mu_y, relax, participation)
        else:
            radius = spectral_radius(model, graph, mu_z, mu_y, relax)
        rounds = math.log(10) / -math.log(radius) if 0 < radius < 1 else math.inf
        table[name] = {"factor per round": radius, "rounds per digit": rounds}
    return table


def _recommend(problem: Problem, graph: Graph, x: Tensor, L: float) -> dict[str, Any]:
    """Return the parameters with the smallest spectral radius, where it can be computed."""
    H = _hessians(problem, x)
    if H is None or float(np.linalg.eigvalsh(H.sum(0))[0]) <= 0:
        return {
            "mu_z": "auto",
            "relax": 0.5,
            "why": "too large or not convex for the one-round operator; mu_z starts at 0.006 L / (mean degree), L from "
            "the warm-up, and follows the residuals",
        }
    choice = best_parameters(H, graph)
    return choice._asdict() | {"why": f"smallest spectral radius of a round, {choice.radius:.4f}, found by search"}
