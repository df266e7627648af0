"""ADAPD: Mancino-Ball, Xu and Chen, "A decentralized primal-dual framework for non-convex smooth consensus
optimization", IEEE TSP 71, 2023.

Each agent has a local model x, its copy x0 of the global one, and duals y (for x = x0) and z (for consensus of x0). q
is W x0 from the last exchange:

    x  ~ argmin f_i(v) + y.(v - x0) + |v - x0|^2 / (2 eta)       a few steps from x
    x0 <- (x + q + eta (y - z)) / 2
    y  <- y + (x - x0) / eta
    send x0;  q <- W x0
    z  <- z + (x0 - q) / eta

variant="og" replaces the first line by one gradient step, x = x0 - eta (grad f_i(old x) + y). variant="mc" mixes with a
Chebyshev polynomial of W and needs as many exchanges per round as its degree. eta refers to unscaled f_i: the authors'
code divides f_i by m, so divide its values of eta by m. The start is x0 = x, with one uncounted exchange for q.

One communication per directed edge and round ("mc": as many as the degree).

Sleeping agents: W is doubly stochastic on the awake subgraph and sleeping agents keep their whole state; sum z = 0
holds in every round.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from caden import solvers
from caden.core import Info, LocalSolver, Method, Round
from caden.errors import require_choice, require_integer, require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._gossip import chebyshev_mix
from caden.methods._registry import BROADCAST, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    x0: Tensor  # (k, d)
    y: Tensor  # (k, d)
    z: Tensor  # (k, d)
    q: Tensor  # (k, d)
    memory: Any


@register(
    {"eta": 2.0, "solver": "exact"},
    BROADCAST,
    {"eta": {"low": 1.0, "high": 1000.0, "unit": "1/L"}, "solver": ["gd", "agd", "adam"]},
)
def adapd(
    eta: float = 3.0,
    variant: str | None = None,
    degree: int = 2,
    solver: LocalSolver | str | dict[str, Any] = "gd",
    start: str | None = None,
) -> Method:
    """ADAPD, with a local model and a copy of the global one at each agent.

    Args:
        eta: the penalty is 1/eta; refers to unscaled f_i.
        variant: None, "og" (one gradient per round) or "mc" (Chebyshev mixing).
        degree: exchanges per round of "mc".
        solver: local solver, as an object, a name or a table.
        start: where local steps begin, as for `caden`; the anchor is x0.

    Reference: Mancino-Ball, Xu and Chen, IEEE TSP 71, 2023.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.adapd(2.0, solver="exact"), problem, graph, rounds=200)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("eta", eta), require_integer("degree", degree, least=1)
    if variant is not None:
        require_choice("variant", variant, ("og", "mc"))
    local = solvers.from_spec(solver)
    begins_at_anchor = solvers.starting_point(start, local)
    exchanges = degree if variant == "mc" else 1

    def init(x: Tensor, round: Round) -> State:
        zero = x * 0
        memory = local.init(round.problem, x, round.curvature)
        return State(x, x, zero, zero, chebyshev_mix(round, x, exchanges), memory)

    def step(state: State, round: Round) -> tuple[State, Info]:
        x0, y, z, memory = state.x0, state.y, state.z, state.memory
        if variant == "og":
            x = awake(round, x0 - eta * (memory.gradient + y), state.x)
            value, gradient = refresh(round, x, memory.value, memory.gradient)
            memory, info = memory._replace(value=value, gradient=gradient), Info(value, gradient)
        else:
            elsewhere = begins_at_anchor(round)
            begin = torch.where(round.work.unsqueeze(1) > 0, x0, state.x) if elsewhere else state.x
            objective = round.objective(y + (begin - x0) / eta, 0 * round.degree + 1 / eta, elsewhere=elsewhere)
            x, memory, info = local.solve(objective, begin, round.work, memory)
        new = awake(round, (x + state.q + eta * (y - z)) / 2, x0)
        y = awake(round, y + (x - new) / eta, y)
        q = awake(round, chebyshev_mix(round, new, exchanges), state.q)
        z = awake(round, z + (new - q) / eta, z)
        return State(x, new, y, z, q, memory), info

    return Method(init, step, "adapd")
