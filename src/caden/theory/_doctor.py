"""Looking at parameters before a run: what must diverge is refused, what is risky is said."""

import numpy as np

from caden.core import Problem, Verdict
from caden.graphs import Graph
from caden.theory._stability import dual_limit, spectral_radius

DENSE = 400  # unknowns (agents x dimension) up to which the one-round operator of a quadratic is built
CLEARLY = 10.0  # times the flat bound: refused, though f_i of curvature far above mu_z d_i would stand it
ROUNDING = 1e-6  # of a spectral radius at 1, a double root where sum H_i is singular


def examine(
    problem: Problem,
    graph: Graph,
    mu_z: float,
    mu_y: float,
    relax: float = 0.5,
    may_sleep: bool = False,
    near_exact: bool = False,
) -> Verdict:
    """Judge CADEN's parameters.

    Quadratics with everyone awake and (nearly) exact local solves are decided by their spectral radius. Elsewhere a
    ratio mu_y / mu_z above the flat bound is a warning, and 10 times above it a refusal.
    """
    k = mu_y / mu_z
    hessian = problem.hessian
    whole = problem.agents == graph.agents and problem.agents * problem.dim <= DENSE
    if hessian is not None and near_exact and not may_sleep and whole:
        H = np.asarray(hessian.double().cpu().numpy())
        radius = spectral_radius(H, graph, mu_z, mu_y, relax)
        if radius > 1 + ROUNDING:
            safe = _largest_stable(H, graph, mu_z, mu_y, relax)
            plain = spectral_radius(H, graph, mu_z, mu_z, relax) < 1
            way = "mu_y = mu_z works" if plain else "raise mu_z"
            return Verdict(
                f"mu_y = {mu_y:.4g} must diverge: a round multiplies the error by {radius:.4g}. "
                f"With mu_z = {mu_z:.4g} and relax = {relax:g} stability ends at mu_y = {safe:.4g}; {way}."
            )
        return Verdict()
    # On any graph e <= 2, so that these ratios need no eigenvalues.
    if k * relax < 1 and k * (2 * relax - 1) < 1:
        return Verdict()
    limit = dual_limit(graph, relax)
    if k >= CLEARLY * limit:
        return Verdict(
            f"mu_y = {mu_y:.4g} is {k / limit:.0f} times the largest that is stable where f is flat, "
            f"{limit * mu_z:.4g} on this graph with relax = {relax:g}: only steep f_i stand that; mu_y = mu_z works."
        )
    if k >= limit:
        return Verdict(
            warning=f"mu_y = {mu_y:.4g} is above {limit * mu_z:.4g}, the largest that is stable where f is flat (this "
            f"graph, relax = {relax:g}): the run may diverge."
        )
    return Verdict()


def _largest_stable(H: np.ndarray, graph: Graph, mu_z: float, mu_y: float, relax: float) -> float:
    """The largest stable mu_y below an unstable one, to three digits; 0 if none is."""
    low, high = 0.0, mu_y
    for _ in range(40):
        middle = (low + high) / 2
        stable = spectral_radius(H, graph, mu_z, middle, relax) < 1 + ROUNDING
        low, high = (middle, high) if stable else (low, middle)
        if high - low < 1e-3 * high:
            break
    return low
