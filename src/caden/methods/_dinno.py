"""DiNNO: Yu, Vincent and Schwager, "DiNNO: distributed neural network optimization for multi-robot collaborative
learning", IEEE RA-L 7(2), 2022.

    exchange x;  p <- p + rho sum_j (x_i - x_j)
    x <- a few Adam steps on  f_i(v) + v.p_i + rho sum_j |v - (x_i + x_j)/2|^2
    rho grows by a factor in each round

The dual moves first, so this is CADEN with mu_z = mu_y = 2 rho, half a round later. One communication per directed edge
and round.

Sleeping agents: the dual moves along edges with both ends awake, so sum p = 0 in every round; the anchors use the last
row that a sleeping agent sent. Exact on strongly convex problems in the tests; we know of no theory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden.core import Info, LocalSolver, Method, Round
from caden.errors import require_positive
from caden.methods._registry import BROADCAST, PENALTY, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    phi: Tensor  # (k, d) the paper's p
    memory: Any


@register({"rho": 0.2, "growth": 1.0, "solver": "exact"}, BROADCAST, {"rho": PENALTY, "growth": [1.0, 1.0003, 1.003]})
def dinno(
    rho: float = 0.05,
    growth: float = 1.0003,
    solver: LocalSolver | str | dict[str, Any] = "adam",
    start: str | None = None,
) -> Method:
    """DiNNO: consensus ADMM whose dual moves before the local steps.

    Args:
        rho: penalty.
        growth: factor by which `rho` grows in every round.
        solver: local solver, as an object, a name or a table.
        start: where local steps begin, as for `caden`; the anchors are (x_i + x_j)/2.

    Reference: Yu, Vincent and Schwager, IEEE RA-L 7(2), 2022.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.dinno(0.2, growth=1.0, solver="exact"), problem, graph, rounds=200)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("rho", rho), require_positive("growth", growth)
    local = solvers.from_spec(solver)
    begins_at_anchor = solvers.starting_point(start, local)

    def init(x: Tensor, round: Round) -> State:
        round.broadcast(x)  # neighbours of a sleeping agent need a row of it
        return State(x, x * 0, local.init(round.problem, x, round.curvature))

    def step(state: State, round: Round) -> tuple[State, Info]:
        rho_t = rho * torch.tensor(growth, dtype=state.x.dtype, device=state.x.device) ** (round.index + 1)
        heard = round.broadcast(state.x)
        awake_laplacian = state.x - heard.mix(torch.ones(len(round.edges.first), device=state.x.device))
        phi = state.phi + rho_t * awake_laplacian
        apart, elsewhere, begin = heard.laplacian(), begins_at_anchor(round), state.x
        if elsewhere:
            begin = torch.where(round.work.unsqueeze(1) > 0, state.x - apart / (2 * round.degree.clamp(min=1)), state.x)
        slope = phi if elsewhere else phi + rho_t * apart
        objective = round.objective(slope, 2 * rho_t * round.degree, elsewhere=elsewhere)
        solved = local.solve(objective, begin, round.work, state.memory)
        return State(solved.x, phi, solved.memory), solved.info

    return Method(init, step, "dinno")
