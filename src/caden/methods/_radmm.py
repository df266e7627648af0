"""Relaxed ADMM with a variable per arc: Bastianello, Carli, Schenato and Todescato, "Asynchronous distributed
optimization over lossy networks via relaxed ADMM", IEEE TAC 66(6), 2021.

Agent i holds z_ij. Each awake agent i:

    x_i  = argmin f_i(v) + rho d_i/2 |v|^2 - (sum_j z_ij).v
    sends q_ij = 2 rho x_i - z_ij to neighbour j
    z_ji <- (1 - alpha) z_ji + alpha q_ij     at j, if the message arrives

One communication per directed edge and round, a different one for each neighbour. alpha = 1/2 is plain ADMM and,
started at z = rho (x_i + x_j)/2, CADEN with mu_y = mu_z.

With `messages = {"trigger": {"first": 1.0, "decay": 0.8}}`, q_ij is sent only if it has moved by more than a threshold
since it was last sent: event-based ADMM on a graph (with a server: Er, Trimpe and Muehlebach, "Distributed event-based
learning via ADMM", ICML 2025). Exact if the thresholds have a finite sum.

Sleeping agents: arcs without a message stay as they are; exact for convex f under random activation and random loss of
messages.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden.core import Info, LocalSolver, Method, Round
from caden.errors import require_fraction, require_positive
from caden.methods._registry import EVERYTHING, PENALTY, RELAX, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    z: Tensor  # (2e, d) arcs
    memory: Any


@register(
    {"rho": 0.4, "alpha": 0.7, "solver": "exact"},
    EVERYTHING,
    {"rho": PENALTY, "alpha": RELAX},
    free=True,
)
def radmm(rho: float = 0.1, alpha: float = 0.5, solver: LocalSolver | str | dict[str, Any] = "lbfgs") -> Method:
    """Relaxed ADMM with a variable per arc.

    Args:
        rho: penalty.
        alpha: relaxation, in (0, 1).
        solver: local solver, as an object, a name or a table.

    Reference: Bastianello, Carli, Schenato and Todescato, IEEE TAC 66(6), 2021.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> method = caden.methods.radmm(0.4, 0.7, solver="exact")
    >>> result = caden.simulate(method, problem, graph, rounds=300, messages={"loss": 0.2})
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("rho", rho)
    require_fraction("alpha", alpha)
    local = solvers.from_spec(solver)

    def init(x: Tensor, round: Round) -> State:
        first, second = round.broadcast(x).ends()
        z = rho / 2 * (first + second)
        return State(x, torch.cat([z, z]), local.init(round.problem, x, round.curvature))

    def step(state: State, round: Round) -> tuple[State, Info]:
        edges, owner = round.edges, round.edges.owner()
        slope = edges.arc_sum(rho * state.x[owner] - state.z)
        solved = local.solve(
            round.objective(slope, rho * round.degree, (1 - alpha) / 2), state.x, round.work, state.memory
        )
        received, arrived = round.exchange(2 * rho * solved.x[owner] - state.z)
        z = torch.where(arrived, (1 - alpha) * state.z + alpha * received, state.z)
        return State(solved.x, z, solved.memory), solved.info

    return Method(init, step, "radmm")
