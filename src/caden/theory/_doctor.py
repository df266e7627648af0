"""Parameter checks before a run: refuse what must diverge, warn about what is risky."""

import numpy as np

from caden.core import Problem, Verdict
from caden.graphs import Graph
from caden.theory._stability import dual_limit, spectral_radius

DENSE = 400  # largest number of unknowns (agents x dimension) for which the one-round operator of a quadratic is built
CLEARLY = 10.0  # times the flat bound: refused, although f_i of curvature far above mu_z d_i would tolerate it
ROUNDING = 1e-6  # error of a spectral radius of 1, a double root if sum H_i is singular


def examine(
    problem: Problem,
    graph: Graph,
    mu_z: float,
    mu_y: float,
    relax: float = 0.5,
    may_sleep: bool = False,
    near_exact: bool = False,
) -> Verdict:
    """Check CADEN's parameters and return a refusal, a warning or neither.

    For quadratics with everyone awake and (nearly) exact local solves, the spectral radius decides. In all other cases
    a ratio mu_y / mu_z above the flat bound gives a warning, and one 10 times above it a refusal.
    """
    ratio = mu_y / mu_z
    hessian = problem.hessian
    fits = problem.agents == graph.agents and problem.agents * problem.dim <= DENSE
    if hessian is not None and near_exact and not may_sleep and fits:
        H = np.asarray(hessian.double().cpu().numpy())
        radius = spectral_radius(H, graph, mu_z, mu_y, relax)
        if radius > 1 + ROUNDING:
            largest = _largest_stable(H, graph, mu_z, mu_y, relax)
            equal_works = spectral_radius(H, graph, mu_z, mu_z, relax) < 1
            remedy = "mu_y = mu_z works" if equal_works else "raise mu_z"
            return Verdict(
                f"`mu_y = {mu_y:.4g}` must diverge: each round multiplies the error by {radius:.4g}. With "
                f"mu_z = {mu_z:.4g} and relax = {relax:g} the largest stable value is mu_y = {largest:.4g}; {remedy}."
            )
        return Verdict()
    # e <= 2 on every graph, so these ratios are safe without computing eigenvalues.
    if ratio * relax < 1 and ratio * (2 * relax - 1) < 1:
        return Verdict()
    limit = dual_limit(graph, relax)
    if ratio >= CLEARLY * limit:
        return Verdict(
            f"`mu_y = {mu_y:.4g}` is {ratio / limit:.0f} times the largest stable value where f is flat, "
            f"{limit * mu_z:.4g} on this graph with relax = {relax:g}: only high-curvature f_i tolerate it; "
            "mu_y = mu_z works."
        )
    if ratio >= limit:
        return Verdict(
            warning=f"`mu_y = {mu_y:.4g}` is above {limit * mu_z:.4g}, the largest stable value where f is flat (this "
            f"graph, relax = {relax:g}): the run may diverge."
        )
    return Verdict()


def _largest_stable(H: np.ndarray, graph: Graph, mu_z: float, mu_y: float, relax: float) -> float:
    """Return the largest stable mu_y below an unstable one, to three digits; 0 if there is none."""
    low, high = 0.0, mu_y
    for _ in range(40):
        middle = (low + high) / 2
        stable = spectral_radius(H, graph, mu_z, middle, relax) < 1 + ROUNDING
        low, high = (middle, high) if stable else (low, middle)
        if high - low < 1e-3 * high:
            break
    return low
