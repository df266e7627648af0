"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: stochastic controlled averaging for federated
learning", ICML 2020 (option II).

    awake agents get theta and c;  v = theta, K times  v <- v - alpha (grad f_i(v) - c_i + c)
    c_i' = c_i - c + (theta - v) / (K alpha)
    theta <- theta + gamma mean(v - theta);  c <- c + |awake|/m mean(c_i' - c_i)

A server method: two communications up and two down per awake agent.

Sleeping agents: the server keeps their last control in its mean; exact.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_positive
from caden.methods._first_order import awake, local_descent
from caden.methods._registry import STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    theta: Tensor  # (d,)
    control: Tensor  # (k, d) c_i above
    server_control: Tensor  # (d,) c above


@register({"alpha": 0.3}, "sleep", {"alpha": STEP, "gamma": [0.5, 0.75, 1.0]}, server=True)
def scaffold(alpha: float = 0.3, gamma: float = 1.0) -> Method:
    """SCAFFOLD, through a server.

    Args:
        alpha: local step size.
        gamma: server step size.

    Reference: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, ICML 2020.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.scaffold(0.3), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha), require_positive("gamma", gamma)

    def init(x: Tensor, round: Round) -> State:
        theta = round.average(x)
        return State(x, theta, x * 0, theta * 0)

    def step(state: State, round: Round) -> tuple[State, Info]:
        x, c = awake(round, state.theta, state.x), state.server_control
        v = local_descent(round, x, alpha, c - state.control)
        K = round.work.clamp(min=1).unsqueeze(1).to(v)
        control = awake(round, state.control - c + (x - v) / (K * alpha), state.control)
        theta = state.theta + gamma * round.average(v - x)
        c = c + round.awake / round.graph.agents * round.average(control - state.control)
        return State(awake(round, theta, x), theta, control, c), Info()

    return Method(init, step, "scaffold")
