"""Dual Newton: Tutunov, Bou-Ammar and Jadbabaie, "Distributed Newton method for large-scale consensus optimization",
IEEE TAC 64(10), 2019.

Consensus is written as Lap x = 0 with multipliers l. The dual function is smooth, and its Newton direction comes from a
Laplacian system. With H_i the Hessian of f_i at x_i,

    x_i  = argmin f_i(v) + (Lap l)_i.v
    c    = (sum H_i)^-1 sum H_i x_i
    solve  Lap p = v,  v_i = H_i (x_i - c)       (the v_i sum to zero)
    l   <- l + step p

The two sums and the Laplacian system use Chebyshev exchanges with neighbours. (Only Lap l enters, so adding v to Lap l
would do the same without a solve. The system is kept so that the communication is the paper's.) With `exchanges` K:
K (d^2 + 2 d) + d numbers per directed edge and round, and a d x d matrix per agent. For small d and strongly convex
f_i.

Sleeping agents: refused; the Newton direction is that of all agents together.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden._tensor.rows import batched_mv, solve_rows
from caden.core import Info, LocalSolver, Method, Round
from caden.curvature import hessians
from caden.errors import require_integer, require_positive
from caden.methods._dense import must_be_awake, must_fit
from caden.methods._gossip import chebyshev_mix, chebyshev_solve
from caden.methods._registry import register


class State(NamedTuple):
    x: Tensor  # (k, d)
    multiplier: Tensor  # (k, d) l above
    phi: Tensor  # (k, d) Lap times the multipliers
    memory: Any


@register({}, "loss compression", {"step_size": {"low": 0.001, "high": 1.0}})
def tutunov(
    step_size: float = 1.0, exchanges: int = 40, solver: LocalSolver | str | dict[str, Any] = "newton"
) -> Method:
    """Dual Newton, for small d and strongly convex f_i; needs everyone awake.

    Args:
        step_size: step size along the Newton direction.
        exchanges: number of exchanges per Laplacian system.
        solver: local solver, as an object, a name or a table.

    Reference: Tutunov, Bou-Ammar and Jadbabaie, IEEE TAC 64(10), 2019.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.tutunov(), problem, graph, rounds=20)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("step_size", step_size), require_integer("exchanges", exchanges, least=1)
    local = solvers.from_spec(solver)

    def init(x: Tensor, round: Round) -> State:
        must_be_awake("tutunov", round)
        must_fit("tutunov", round.graph.agents, x)
        return State(x, x * 0, x * 0, local.init(round.problem, x, round.curvature))

    def step(state: State, round: Round) -> tuple[State, Info]:
        x, memory, info = local.solve(round.objective(state.phi, 0 * round.degree), state.x, round.work, state.memory)
        k, d = x.shape
        H = hessians(round.problem, x)
        weighted = batched_mv(H, x)
        means = chebyshev_mix(round, torch.cat([H.reshape(k, d * d), weighted], dim=1), exchanges)
        c = solve_rows(means[:, : d * d].reshape(k, d, d), means[:, d * d :])
        v = batched_mv(H, x - c)
        multiplier = state.multiplier + step_size * chebyshev_solve(round, v, exchanges)
        return State(x, multiplier, round.broadcast(multiplier).laplacian(), memory), info

    return Method(init, step, "tutunov")
