"""Chebyshev polynomials of the graph: averages and Laplacian systems by repeated exchanges with neighbours."""

import numpy as np
from torch import Tensor

from caden.core import Round
from caden.errors import CadenError


def chebyshev_mix(round: Round, x: Tensor, degree: int) -> Tensor:
    """p(W) x with the Chebyshev polynomial of the given degree scaled to p(1) = 1; one broadcast per degree."""
    new = round.broadcast(x).mix()
    if degree == 1:
        return new
    rho = _second(round)
    old, ratio = x, rho  # of T_(k-1)(1/rho) to T_k(1/rho), which themselves would overflow
    for _ in range(degree - 1):
        next_ratio = 1 / (2 / rho - ratio)
        old, new = new, next_ratio * (2 / rho * round.broadcast(new).mix() - ratio * old)
        ratio = next_ratio
    return new


def chebyshev_solve(round: Round, right: Tensor, iterations: int) -> Tensor:
    """Approximate solution of Lap v = right, whose rows sum to zero; one broadcast per iteration."""
    low, high = round.graph.spectrum
    centre, radius = (high + low) / 2, max((high - low) / 2, 1e-3 * high)
    v, r, d = right * 0, right, right / centre
    ratio = radius / centre
    for _ in range(iterations):
        v, r = v + d, r - round.broadcast(d).laplacian()
        next_ratio = 1 / (2 * centre / radius - ratio)
        d, ratio = next_ratio * ratio * d + 2 * next_ratio / radius * r, next_ratio
    return v


def _second(round: Round) -> float:
    """Second largest modulus of an eigenvalue of the Metropolis matrix of the whole graph."""
    if round.graph.agents > 5000:
        raise CadenError(f"Chebyshev mixing needs the spectrum of W; {round.graph.agents} agents are too many.")
    values = np.abs(np.linalg.eigvalsh(round.graph.metropolis()))
    return max(float(np.sort(values)[-2]), 1e-3)
