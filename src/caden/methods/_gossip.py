"""Averaging with the neighbours: damped, random pairs, Chebyshev polynomials; Laplacian systems by exchanges."""

import numpy as np
from torch import Tensor

from caden.core import Round
from caden.errors import CadenError


def damped_mix(round: Round, rows: Tensor, gamma: float) -> Tensor:
    """Return rows + gamma (W known - known), `known` being what all know of the rows after they are sent."""
    return rows + gamma * (round.broadcast(rows).mix() - rows)


def in_random_pairs(round: Round) -> Round:
    """Return the round on a random matching of the graph's edges, to which no other edge could be added."""
    edges, free = round.graph.edges, np.ones(round.graph.agents, bool)
    chosen = np.zeros(len(edges), bool)
    stream = np.random.default_rng(int(round.uniform("pairs") * 2**53))
    for edge in stream.permutation(len(edges)).tolist():
        if free[edges[edge]].all():
            chosen[edge], free[edges[edge]] = True, False
    return round.over(chosen)


def chebyshev_mix(round: Round, x: Tensor, degree: int) -> Tensor:
    """Return p(W) x, p being the Chebyshev polynomial of this degree with p(1) = 1; `degree` broadcasts."""
    new = round.broadcast(x).mix()
    if degree == 1:
        return new
    rho = _second_modulus(round)
    old, ratio = x, rho  # T_(k-1)(1/rho) / T_k(1/rho); T_k itself would overflow
    for _ in range(degree - 1):
        next_ratio = 1 / (2 / rho - ratio)
        old, new = new, next_ratio * (2 / rho * round.broadcast(new).mix() - ratio * old)
        ratio = next_ratio
    return new


def chebyshev_solve(round: Round, right: Tensor, iterations: int) -> Tensor:
    """Solve Lap v = right approximately, the rows of `right` summing to zero; one broadcast per iteration."""
    low, high = round.graph.spectrum
    centre, radius = (high + low) / 2, max((high - low) / 2, 1e-3 * high)
    v, r, d = right * 0, right, right / centre
    ratio = radius / centre
    for _ in range(iterations):
        v, r = v + d, r - round.broadcast(d).laplacian()
        next_ratio = 1 / (2 * centre / radius - ratio)
        d, ratio = next_ratio * ratio * d + 2 * next_ratio / radius * r, next_ratio
    return v


def _second_modulus(round: Round) -> float:
    """Return the second largest eigenvalue modulus of the Metropolis matrix of the whole graph."""
    if round.graph.agents > 5000:
        raise CadenError(
            f"Chebyshev mixing needs the spectrum of W and takes at most 5000 agents, got {round.graph.agents}; "
            "use a method or `variant` without it."
        )
    moduli = np.abs(np.linalg.eigvalsh(round.graph.metropolis()))
    return max(float(np.sort(moduli)[-2]), 1e-3)
