"""CADEN on quadratics: the one-round operator, its spectral radius, and bounds on mu_y.

Let f_i(x) = x'H_i x/2 with exact local solves, Lap the Laplacian and D the degrees (Kronecker the identity), a = relax,
N = 2D - Lap. With everyone awake, a round is

    P x+ = -phi + mu_z S,    S+ = a N x+ + (1 - 2a) S,    phi+ = phi + a mu_y Lap x+,     P = H + mu_z D,

and a mode x_t = s^t v solves  (P (s - 1)(s - 1 + 2a) + a mu_y (s - 1 + 2a) Lap - a mu_z (s - 1) N) v = 0. With v'Pv,
v'Lap v, v'Nv in place of the matrices this is a real quadratic in s. Jury's conditions for it are

    M_minus = 2(1-a) P + a mu_z N - a(1-a) mu_y Lap > 0,        (no root at s = -1)
    M_circle = 2 H + (mu_z - (2a - 1) mu_y) Lap > 0             (no pair on the unit circle)

which for a = 1/2 are  2H + 4 mu_z D - (mu_z + mu_y/2) Lap > 0  and  2H + mu_z Lap > 0. If both are positive definite
(and P is), the round is stable. If M_minus has a negative eigenvalue, it is unstable, since a real root has passed -1.
docs/theory.md has the proof.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from caden.errors import CadenError
from caden.graphs import Graph


def _matrices(H: np.ndarray, graph: Graph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return block-diagonal H, D and Lap, all (md, md)."""
    H = np.asarray(H, float)
    m, d = H.shape[:2]
    if H.shape != (graph.agents, d, d):
        raise CadenError(f"`H` must have shape ({graph.agents}, d, d), got {H.shape}.")
    block = np.zeros((m, d, m, d))
    block[np.arange(m), :, np.arange(m), :] = H
    identity = np.eye(d)
    return block.reshape(m * d, m * d), np.kron(np.diag(graph.degrees), identity), np.kron(graph.laplacian, identity)


def margins(H: np.ndarray, graph: Graph, mu_z: float, mu_y: float, relax: float = 0.5) -> tuple[float, float]:
    """Return the smallest eigenvalues of M_minus and M_circle for Hessians H (m, d, d); stable if both are positive."""
    H, D, Lap = _matrices(H, graph)
    N = 2 * D - Lap
    minus = 2 * (1 - relax) * (H + mu_z * D) + relax * mu_z * N - relax * (1 - relax) * mu_y * Lap
    circle = 2 * H + (mu_z - (2 * relax - 1) * mu_y) * Lap
    return float(np.linalg.eigvalsh(minus)[0]), float(np.linalg.eigvalsh(circle)[0])


def curvature_margin(graph: Graph, low: float, high: float, mu_z: float, mu_y: float, relax: float = 0.5) -> int:
    """Return 1 if all curvatures between `low` and `high` are stable, -1 if all are unstable, else 0."""
    minus, circle = margins(np.zeros((graph.agents, 1, 1)), graph, mu_z, mu_y, relax)
    convexity = low + mu_z * float(graph.degrees.min()) > 0
    if convexity and minus + 2 * (1 - relax) * low > 0 and circle + 2 * low > 0:
        return 1
    return -1 if minus + 2 * (1 - relax) * high < 0 else 0


def dual_limit(graph: Graph, relax: float = 0.5) -> float:
    """Return the largest stable mu_y / mu_z where f is flat.

    With e the largest eigenvalue of D^-1 Lap it is min( (2/(a e) - 1) / (1 - a),  1/(2a - 1) ), the second for a > 1/2
    only. For a = 1/2 it is 8/e - 2, at least 2.
    """
    e = graph.normalised_spectrum[1]
    limit = (2 / (relax * e) - 1) / (1 - relax)
    return min(limit, 1 / (2 * relax - 1)) if relax > 0.5 else limit


def spectral_radius(H: np.ndarray, graph: Graph, mu_z: float, mu_y: float, relax: float = 0.5) -> float:
    """Return the asymptotic factor of the error per round, for Hessians H (m, d, d) and everyone awake.

    It is the largest modulus of the eigenvalues of the round on (phi, S), without those that no run excites: d of value
    1, for sum phi, which stays 0, and, if the graph is bipartite, d of value 1 - 2a, for the part of S outside the
    range of N.
    """
    m, d = np.asarray(H).shape[:2]
    block, D, Lap = _matrices(H, graph)
    n = m * d
    to_x = np.linalg.solve(block + mu_z * D, np.hstack([-np.eye(n), mu_z * np.eye(n)]))  # (phi, S) -> x+
    step = np.vstack([relax * mu_y * Lap @ to_x, relax * (2 * D - Lap) @ to_x])
    step[:n, :n] += np.eye(n)
    step[n:, n:] += (1 - 2 * relax) * np.eye(n)
    values = list(np.linalg.eigvals(step))
    bipartite = graph.normalised_spectrum[1] > 2 - 1e-9
    for unexcited in [1.0] * d + [1 - 2 * relax] * (d if bipartite else 0):
        values.pop(int(np.argmin(np.abs(np.array(values) - unexcited))))
    return float(np.abs(values).max())


def sampled_radius(
    H: np.ndarray,
    graph: Graph,
    mu_z: float,
    mu_y: float,
    relax: float = 0.5,
    participation: float | np.ndarray = 0.5,
    rounds: int = 4000,
    seed: int = 0,
) -> float:
    """Estimate the same factor with sleeping agents, by Monte Carlo.

    It is the growth of a product of random rounds, in edge variables.
    """
    H = np.asarray(H, float)
    m, d = H.shape[:2]
    first, second = graph.edges.T
    rng = np.random.default_rng(seed)
    inverse = np.linalg.inv(H + mu_z * graph.degrees[:, None, None] * np.eye(d))
    x = rng.normal(size=(m, d))
    s, y = (x[first] + x[second]) / 2, np.zeros((len(first), d))
    inverse_laplacian = np.linalg.pinv(graph.laplacian, hermitian=True)
    log_growth, skipped = 0.0, rounds // 5
    for t in range(rounds):
        awake = np.asarray(rng.random(m) < participation)
        pull = np.zeros_like(x)
        np.add.at(pull, first, mu_z * s - y)
        np.add.at(pull, second, mu_z * s + y)
        x = np.where(awake[:, None], np.einsum("mij,mj->mi", inverse, pull), x)
        u, w = awake[first, None] * (x[first] - s), awake[second, None] * (x[second] - s)
        s, y = s + relax * (u + w), y + relax * mu_y * (u - w)
        phi = np.zeros_like(x)
        np.add.at(phi, first, y)
        np.add.at(phi, second, -y)
        potential = inverse_laplacian @ phi
        y = potential[first] - potential[second]  # the smallest y with this phi: circulations act on no agent
        size = float(np.sqrt((x**2).sum() + (s**2).sum() + (y**2).sum()))
        x, s, y = x / size, s / size, y / size
        log_growth += np.log(size) if t >= skipped else 0.0
    return float(np.exp(log_growth / (rounds - skipped)))


class Choice(NamedTuple):
    """Parameters and their spectral radius."""

    mu_z: float
    mu_y: float
    relax: float
    radius: float


def best_parameters(H: np.ndarray, graph: Graph, relaxes: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)) -> Choice:
    """Return mu_z (with mu_y = mu_z) and relax with the smallest spectral radius, for Hessians H (m, d, d)."""
    scale = float(np.abs(np.linalg.eigvalsh(np.asarray(H))).max()) / float(graph.degrees.mean())

    def radius(exponent: float, relax: float) -> float:
        mu = scale * 10**exponent
        return spectral_radius(H, graph, mu, mu, relax)

    choices = []
    for relax in relaxes:
        grid = np.linspace(-3, 1, 9)
        start = grid[int(np.argmin([radius(e, relax) for e in grid]))]
        optimum = minimize_scalar(
            radius,
            (start - 0.5, start + 0.5),
            args=(relax,),
            method="bounded",
            bounds=(start - 0.5, start + 0.5),
            options={"xatol": 0.01},
        )
        mu = scale * 10 ** float(optimum.x)
        choices.append(Choice(mu, mu, relax, float(optimum.fun)))
    return min(choices, key=lambda choice: choice.radius)
