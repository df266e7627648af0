"""DRUID: Li, Voulgaris, Stipanovic and Freris, "Communication efficient curvature aided primal-dual algorithms for
decentralized optimization", IEEE TAC 68(11), 2023; DLM: Ling, Shi, Wu and Ribeiro, "DLM: decentralized linearized
alternating direction method of multipliers", IEEE TSP 63(15), 2015.

CADEN with a single local step and no line search. With r_i = grad f_i(x_i) + phi_i + mu_z/2 sum_j (x_i - x_j),

    x_i <- x_i - (J_i + (mu_z d_i + eps) I)^-1 r_i
    broadcast x_i;  phi_i <- phi_i + mu_z/2 sum_j (x_i - x_j)

J_i is 0 ("gd", which is DLM with c = mu_z/2 and rho = eps), the Hessian ("newton", by conjugate gradients on
Hessian-vector products), or its L-BFGS estimate ("lbfgs"). One communication per directed edge and one gradient per
round.

Sleeping agents: CADEN's half-step rule; exact.
"""

from caden.core import LocalSolver, Method
from caden.errors import require_choice, require_positive
from caden.methods._caden import caden
from caden.methods._registry import EVERYTHING, PENALTY, register
from caden.solvers import gd, lbfgs, newton


def _one_step(solver: LocalSolver) -> LocalSolver:
    """Limit a solver to one local step per round."""
    return solver._replace(
        solve=lambda objective, x, work, memory: solver.solve(objective, x, work.clamp(max=1), memory)
    )


@register(
    {"mu_z": 0.4, "direction": "newton", "eps": 0.2},
    EVERYTHING,
    {"mu_z": PENALTY, "direction": ["gd", "newton", "lbfgs"], "eps": [0.3, 1.0, 3.0]},
    free=True,
)
def druid(mu_z: float = 0.1, direction: str = "lbfgs", eps: float = 1.0) -> Method:
    """DRUID: CADEN with a single curvature-aided step per round.

    Args:
        mu_z: penalty.
        direction: direction of the local step: "gd", "newton" or "lbfgs".
        eps: covers the curvature that the step's model misses.

    Reference: Li, Voulgaris, Stipanovic and Freris, IEEE TAC 68(11), 2023.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.druid(0.4, "newton", 0.2), problem, graph, rounds=200)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("mu_z", mu_z), require_positive("eps", eps)
    kinds = {"gd": gd(curvature=eps), "newton": newton(eps=eps), "lbfgs": lbfgs(line_search="none", eps=eps)}
    solver = kinds[require_choice("direction", direction, kinds)]
    return caden(mu_z=mu_z, solver=_one_step(solver))._replace(name="druid")


@register({"c": 0.2, "rho": 1.0}, EVERYTHING, {"c": PENALTY, "rho": [0.5, 2.0, 10.0]}, free=True)
def dlm(c: float = 0.05, rho: float = 2.0) -> Method:
    """DLM: linearised ADMM with one gradient per round.

    Args:
        c: penalty.
        rho: proximal weight; covers the curvature of the f_i.

    Reference: Ling, Shi, Wu and Ribeiro, IEEE TSP 63(15), 2015.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.dlm(0.2, 1.0), problem, graph, rounds=400)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("c", c), require_positive("rho", rho)
    return caden(mu_z=2 * c, solver=_one_step(gd(curvature=rho)))._replace(name="dlm")
