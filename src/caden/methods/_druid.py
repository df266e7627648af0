"""DRUID: Li, Voulgaris, Stipanovic and Freris, "Communication efficient curvature aided primal-dual algorithms for
decentralized optimization", IEEE TAC 68(11), 2023; DLM: Ling, Shi, Wu and Ribeiro, "DLM: decentralized linearized
alternating direction method of multipliers", IEEE TSP 63(15), 2015.

CADEN with a single local step and no line search. With r_i = grad f_i(x_i) + phi_i + mu_z/2 sum_j (x_i - x_j),

    x_i <- x_i - (J_i + (mu_z d_i + eps) I)^-1 r_i
    broadcast x_i;  phi_i <- phi_i + mu_z/2 sum_j (x_i - x_j)

J_i is 0 ("gd", which is DLM with c = mu_z/2 and rho = eps), the Hessian ("newton", by conjugate gradients on
Hessian-vector products), or its L-BFGS estimate ("lbfgs"). One vector per directed edge, one gradient a round. Sleeping
agents: CADEN's half-step rule; exact.
"""

from __future__ import annotations

from caden.core import LocalSolver, Method
from caden.errors import choose, positive
from caden.methods._caden import caden
from caden.solvers import gd, lbfgs, newton


def _one_step(solver: LocalSolver) -> LocalSolver:
    """The solver with at most one iteration a round."""
    return solver._replace(
        solve=lambda objective, x, work, memory: solver.solve(objective, x, work.clamp(max=1), memory)
    )


def druid(mu_z: float = 0.1, step: str = "lbfgs", eps: float = 1.0) -> Method:
    """DRUID with penalty `mu_z` and a "gd", "newton" or "lbfgs" step; `eps` covers the curvature that J_i misses."""
    positive("mu_z", mu_z), positive("eps", eps)
    kinds = {"gd": gd(curvature=eps), "newton": newton(eps=eps), "lbfgs": lbfgs(line_search="none", eps=eps)}
    solver = kinds[choose("step", step, kinds)]
    return caden(mu_z=mu_z, solver=_one_step(solver))._replace(name="druid")


def dlm(c: float = 0.05, rho: float = 2.0) -> Method:
    """DLM: linearised ADMM with penalty `c` and proximal weight `rho`."""
    positive("c", c), positive("rho", rho)
    return caden(mu_z=2 * c, solver=_one_step(gd(curvature=rho)))._replace(name="dlm")
