"""FedADMM: Gong, Li and Freris, "FedADMM: a robust federated deep learning framework with adaptivity to system
heterogeneity", ICDE 2022.

    awake agents get theta;  w_i ~ argmin f_i(w) + a_i.(w - theta) + rho/2 |w - theta|^2   a few steps from w_i
    a_i <- a_i + rho (w_i - theta)
    theta <- theta + 1/m sum over the awake of (change of w_i) + (change of a_i) / rho

The server's step is that of exact ADMM, which preserves theta = mean(w_i + a_i/rho). The authors' step 1/|awake| does
not. A server method: one communication up and one down per awake agent.

Sleeping agents: the server keeps their last contribution in its mean; exact.
"""

from typing import Any, NamedTuple

from torch import Tensor

from caden import solvers
from caden.core import Info, LocalSolver, Method, Round
from caden.errors import require_positive
from caden.methods._first_order import awake
from caden.methods._registry import PENALTY, register


class State(NamedTuple):
    x: Tensor  # (k, d) the paper's w
    theta: Tensor  # (d,)
    dual: Tensor  # (k, d) a_i above
    memory: Any


@register({"rho": 0.3, "solver": "exact"}, "sleep", {"rho": PENALTY, "solver": ["gd", "agd", "lbfgs"]}, server=True)
def fedadmm(rho: float = 0.3, solver: LocalSolver | str | dict[str, Any] = "gd") -> Method:
    """FedADMM, through a server.

    Args:
        rho: penalty.
        solver: local solver, as an object, a name or a table.

    Reference: Gong, Li and Freris, ICDE 2022.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.fedadmm(0.3, solver="exact"), problem, graph, rounds=200)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("rho", rho)
    local = solvers.from_spec(solver)

    def init(x: Tensor, round: Round) -> State:
        return State(x, round.average(x), x * 0, local.init(round.problem, x, round.curvature))

    def step(state: State, round: Round) -> tuple[State, Info]:
        objective = round.objective(state.dual + rho * (state.x - state.theta), 0 * round.degree + rho)
        solved = local.solve(objective, state.x, round.work, state.memory)
        dual = awake(round, state.dual + rho * (solved.x - state.theta), state.dual)
        change = solved.x - state.x + (dual - state.dual) / rho
        theta = state.theta + round.awake / round.graph.agents * round.average(change)
        return State(solved.x, theta, dual, solved.memory), solved.info

    return Method(init, step, "fedadmm")
