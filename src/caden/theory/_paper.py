"""Section 3 of the CADEN paper: Lemma 1, the conditions and constants of Theorem 1, Corollary 1.

Each constant has two versions. "printed" is the text of the theorem. "derived" is what the paper's own chain of
inequalities gives when carried out without errors (docs/theory.md goes through it). In neither version does a bound
follow from the theorem's conditions; docs/theory.md explains why.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from caden.core import Problem
from caden.errors import CadenError, require_choice, require_positive
from caden.graphs import Graph


class Facts(NamedTuple):
    """The quantities that the constants depend on."""

    d_max: float
    lambda_min: float  # second smallest eigenvalue of the Laplacian
    lambda_max: float
    L: float
    mu_z: float
    mu_y: float
    p_min: float
    rate: float  # r^tau

    @classmethod
    def of(cls, graph: Graph, L: float, mu_z: float, mu_y: float, p_min: float, r: float, tau: int) -> Facts:
        """Collect them from a graph, L, the parameters, the least participation, and tau local steps of rate r."""
        require_positive("L", L), require_positive("mu_z", mu_z), require_positive("mu_y", mu_y)
        if not 0 < p_min <= 1 or not 0 <= r < 1:
            raise CadenError(f"`p_min` must lie in (0, 1] and `r` in [0, 1), got {p_min} and {r}.")
        low, high = graph.spectrum
        return cls(float(graph.degrees.max()), low, high, L, mu_z, mu_y, p_min, r**tau)


class Constants(NamedTuple):
    """C_1 .. C_8 and C-hat_1 .. C-hat_4. A bound follows only if C_3, C_4 and the denominators are positive."""

    C1: float
    C2: float
    C3: float
    C4: float
    C5: float
    C6: float
    C7: float
    C8: float
    hat1: float
    hat2: float
    hat3: float
    hat4: float
    contraction: float  # 1 - (the factor of the sum |Ax - Bz|^2 that is moved to the left side); must be positive

    @property
    def bound_follows(self) -> bool:
        """Whether C_3, C_4 and the denominators are positive."""
        return min(self.C3, self.C4, self.hat1, self.contraction) > 0


def lemma1(graph: Graph, x: Tensor, sharp: bool = False) -> tuple[float, float, float]:
    """Return the three sides of Lemma 1: lambda |Ax - Bz|^2 <= sum_i |sum_j (x_i - z_ij)|^2 <= d_max |Ax - Bz|^2.

    z_ij = (x_i + x_j)/2; lambda = lambda_min^2 / (2 lambda_max), or the larger lambda_min / 2 if `sharp`.
    """
    low, high = graph.spectrum
    i, j = torch.from_numpy(graph.edges.copy()).T
    half = (x[i] - x[j]) / 2
    residual = 2 * float((half**2).sum())
    pulls = torch.zeros_like(x).index_add_(0, i, half).index_add_(0, j, half, alpha=-1)
    factor = low / 2 if sharp else low**2 / (2 * high)
    return factor * residual, float((pulls**2).sum()), float(graph.degrees.max()) * residual


def theorem1(facts: Facts) -> dict[str, tuple[float, float, bool]]:
    """Return the conditions of Theorem 1: name -> (value, bound, holds).

    mu_z >= 1 + 2L;  mu_y >= 1152 d_max^2 mu_z lambda_max / (lambda_min^2 p_min);
    r^tau <= lambda_min^2 p_min / (4608 d_max^4 mu_z lambda_max).
    """
    d, low, high, L, mu_z, mu_y, p, rate = facts
    z_min, y_min = 1 + 2 * L, 1152 * d**2 * mu_z * high / (low**2 * p)
    rate_max = low**2 * p / (4608 * d**4 * mu_z * high)
    return {
        "mu_z": (mu_z, z_min, mu_z >= z_min * (1 - 1e-6)),  # L is measured
        "mu_y": (mu_y, y_min, mu_y >= y_min * (1 - 1e-12)),
        "r^tau": (rate, rate_max, rate <= rate_max),
    }


def corollary1(graph: Graph, L: float, p_min: float, r: float) -> dict[str, float]:
    """Return mu_z, mu_y and tau of Corollary 1, and the order of its constants.

    The order is d_max^4 L lambda_max / (lambda_min^2 p_min).
    """
    d, (low, high) = float(graph.degrees.max()), graph.spectrum
    mu_z = 2 * L + 1
    bound = low**2 * p_min / (4608 * d**4 * high * mu_z)
    return {
        "mu_z": mu_z,
        "mu_y": 1152 * d**2 * high * mu_z / (low**2 * p_min),
        "tau": math.ceil(math.log(bound) / math.log(r)) if r > 0 else 1,
        "order": d**4 * L * high / (low**2 * p_min),
    }


def constants(facts: Facts, version: str = "printed") -> Constants:
    """Return the constants of Theorem 1, as "printed" or as "derived"."""
    return {"printed": _printed, "derived": _derived}[require_choice("version", version, ("printed", "derived"))](facts)


def _hats(facts: Facts) -> tuple[float, float, float]:
    """Return C-hat_1 .. C-hat_3, which are the same in both versions."""
    p, rate = facts.p_min, facts.rate
    return 1 - 4 * rate / p, (4 + 3 * p**2 - 6 * p) / p**2, 2 / p


def _printed(facts: Facts) -> Constants:
    """Compute the constants of Theorem 1 as printed.

    With R = r^tau, q = lambda_max / lambda_min^2, h1..h4 the C-hats and d = d_max:

    h1 = 1 - 4R/p,  h2 = (4 + 3p^2 - 6p)/p^2,  h3 = 2/p,
    h4 = 6q ( R (4p - 8R)(4 + 3p^2 - 6p) / (p^2 (p - 4R)) + (2 + p^2 - 3p) / (p mu_y^2) ),
    a  = 36 q/mu_y^2 + h4,   b = d^2 mu_z^2 + L^2,   k = 1 - h4 d^2,   k1 = 1 - h4 d,
    C3 = mu_z - 2R h2/h1 - 2R h2 mu_y^2 mu_z^2 a/(h1 k) - mu_z^2 mu_y a/k,
    C4 = p (2 mu_z - 1 - 2L)/4 - 36 R h2 q mu_z^2 b/(h1 k) - 18 q mu_z^2 b/(mu_y k),
    C5 = 1/h1 + 12 R h2 q (1 + h3)/(h1^2 k) + 6q (1 + h3)/(h1 mu_y k1),
    C6 = 4/h1 + 48 R h2 q (1 + h3)/(h1^2 k) + 6q (1 + h3)(8 mu_z d + 1)/(h1 mu_y k1),
    C7 = 108 R h2 q mu_z^2 b/(h1 k) + 2L^2 + 8 mu_z^2 d^2 + 18 q mu_z^2 b/(mu_y k) (8 mu_z^2 d^2 + 1),
    C8 = 8R h2/h1 + 8R h2 mu_y^2 mu_z^2 a/(h1 k) + mu_z^2 (8 mu_z^2 d + 1) a/k,
    C1 = max(C8/C3, C7/C4),   C2 = C6 + C1 C5.
    """
    d, low, high, L, z, y, p, R = facts
    h1, h2, h3 = _hats(facts)
    q = high / low**2
    inner = R * (4 * p - 8 * R) * (4 + 3 * p**2 - 6 * p) / (p**2 * (p - 4 * R))
    h4 = 6 * q * (inner + (2 + p**2 - 3 * p) / (p * y**2))
    k, k1 = 1 - h4 * d**2, 1 - h4 * d
    a, b = 36 * q / y**2 + h4, d**2 * z**2 + L**2
    C3 = z - 2 * R * h2 / h1 - 2 * R * h2 * y**2 * z**2 / (h1 * k) * a - z**2 * y / k * a
    C4 = p * (2 * z - 1 - 2 * L) / 4 - 36 * R * h2 * q * z**2 * b / (h1 * k) - 18 * q * z**2 * b / (y * k)
    C5 = 1 / h1 + 12 * R * h2 * q * (1 + h3) / (h1**2 * k) + 6 * q * (1 + h3) / (h1 * y * k1)
    C6 = 4 / h1 + 48 * R * h2 * q * (1 + h3) / (h1**2 * k) + 6 * q * (1 + h3) * (8 * z * d + 1) / (h1 * y * k1)
    C7 = (
        108 * R * h2 * q * z**2 * b / (h1 * k)
        + 2 * L**2
        + 8 * z**2 * d**2
        + 18 * q * z**2 * b / (y * k) * (8 * z**2 * d**2 + 1)
    )
    C8 = 8 * R * h2 / h1 + 8 * R * h2 * y**2 * z**2 / (h1 * k) * a + z**2 * (8 * z**2 * d + 1) / k * a
    C1 = max(C8 / C3, C7 / C4)
    return Constants(C1, C6 + C1 * C5, C3, C4, C5, C6, C7, C8, h1, h2, h3, h4, min(k, k1))


def _derived(facts: Facts) -> Constants:
    """Carry out the same chain of inequalities with all its factors.

    Sums over rounds of E|e^0|^2, |z^t - z^(t-1)|^2 and |x-hat^(t+1) - x^t|^2 are written as coefficient vectors. With
    R = 2 r^tau C-hat_2 / C-hat_1 and Q = 6 lambda_max / (lambda_min^2 mu_y^2):

        kappa <= 2 d mu_y^2 S + 4 d mu_z^2 (dz)                              S = sum |Ax - Bz|^2
        e-hat <= e0 / C-hat_1 + R kappa
        e     <= C-hat_3 e-hat + (C-hat_2 - 1) kappa
        S     <= Q ( e + e-hat + 6 d mu_z^2 (dz) + 3 (d^2 mu_z^2 + L^2) (dx) )
    """
    d, low, high, L, z, y, p, rate = facts
    h1, h2, h3 = _hats(facts)
    Q, R = 6 * high / (low**2 * y**2), 2 * rate * h2 / h1
    weight = (1 + h3) * R + h2 - 1  # of kappa in e + e-hat
    h4 = 2 * Q * weight * y**2
    k = 1 - h4 * d
    e0, dz, dx = np.eye(3, dtype=object)
    S = Q * ((1 + h3) / h1 * e0 + (6 + 4 * weight) * d * z**2 * dz + 3 * (d**2 * z**2 + L**2) * dx) / k
    error = e0 / h1 + R * (2 * d * y**2 * S + 4 * d * z**2 * dz)
    descent = z * dz + p * (2 * z - 1 - 2 * L) / 4 * dx - error - y * S
    V = 4 * error + (2 * L**2 + 8 * z**2 * d**2) * dx + (8 * z**2 * d + 1) * S
    C5, C3, C4 = -descent[0], descent[1], descent[2]
    C6, C8, C7 = V
    C1 = max(C8 / C3, C7 / C4)
    return Constants(C1, C6 + C1 * C5, C3, C4, C5, C6, C7, C8, h1, h2, h3, h4, k)


def convex_bound(problem: Problem, graph: Graph, x0: Tensor, solution: Tensor, mu: float) -> float:
    """Return B such that the mean of V^1 .. V^T is at most B / T.

    This holds for convex f_i, everyone awake, exact solves and mu_y = mu_z = `mu`.

    B = max(mu d_max, 1/mu) ( mu |B(z^0 - z*)|^2 + |y*|^2 / mu ), from the classical decrease of ADMM's own Lyapunov
    function and grad f(x^t) + A'y^t = mu A'B (z^(t-1) - z^t). |y*|^2 = 2 g'Lap^+ g with g_i = grad f_i(x*).
    """
    i, j = torch.from_numpy(graph.edges.copy()).T
    z = (x0[i] + x0[j]) / 2 - solution
    g = problem.value_and_grad(solution.expand_as(x0).contiguous())[1].double().cpu().numpy()
    dual = 2 * float(np.sum(g * (np.linalg.pinv(graph.laplacian, hermitian=True) @ g)))
    return max(mu * float(graph.degrees.max()), 1 / mu) * (2 * mu * float((z**2).sum()) + dual / mu)
