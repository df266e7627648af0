"""ADMM with all its edge variables: eq. (5) of the CADEN paper (Yi, Zeng and Freris, arXiv:2504.04073, 2025) before any
variable is eliminated.

    x_i      = argmin f_i(v) + sum_j ( y_ij,i.(v - z_ij) + mu_z/2 |v - z_ij|^2 )
    z_ij     = ( x_i + x_j + (y_ij,i + y_ij,j)/mu_z ) / 2
    y_ij,i  <- y_ij,i + mu_y (x_i - z_ij)

The agent form is tested against this reference. One communication per directed edge and round.

Sleeping agents: refused; Algorithm 1 was derived from this form with everyone awake.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden.core import Info, LocalSolver, Method, Round
from caden.errors import require_positive
from caden.methods._dense import must_be_awake
from caden.methods._registry import PENALTY, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    phi: Tensor  # (k, d) sum of the agent's y
    z: Tensor  # (e, d)
    y: Tensor  # (2e, d) arcs: y_ij,i then y_ij,j
    memory: Any


@register({"mu_z": 0.4}, "compression", {"mu_z": PENALTY})
def admm_edges(mu_z: float, mu_y: float | None = None, solver: LocalSolver | str | dict[str, Any] = "exact") -> Method:
    """Eq. (5) of the CADEN paper with y and z on edges; needs everyone awake.

    Args:
        mu_z: penalty.
        mu_y: dual step, `mu_z` if None.
        solver: local solver; exact by default, for quadratic problems.

    Reference: Yi, Zeng and Freris, arXiv:2504.04073, 2025, eq. (5).

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.admm_edges(mu_z=0.4), problem, graph, rounds=200)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("mu_z", mu_z)
    dual_step = mu_z if mu_y is None else require_positive("mu_y", mu_y)
    local = solvers.from_spec(solver)

    def init(x: Tensor, round: Round) -> State:
        must_be_awake("admm_edges", round)
        first, second = round.broadcast(x).ends()
        memory = local.init(round.problem, x, round.curvature)
        return State(x, torch.zeros_like(x), (first + second) / 2, x.new_zeros(2 * len(first), x.shape[1]), memory)

    def step(state: State, round: Round) -> tuple[State, Info]:
        edges, half = round.edges, len(state.z)
        pull = state.y + mu_z * (state.x[edges.owner()] - torch.cat([state.z, state.z]))
        objective = round.objective(edges.arc_sum(pull), mu_z * round.degree)
        solved = local.solve(objective, state.x, round.work, state.memory)
        first, second = round.broadcast(solved.x).ends()
        z = (first + second + (state.y[:half] + state.y[half:]) / mu_z) / 2
        y = state.y + dual_step * (torch.cat([first, second]) - torch.cat([z, z]))
        return State(solved.x, edges.arc_sum(y), z, y, solved.memory), solved.info

    return Method(init, step, "admm_edges")
