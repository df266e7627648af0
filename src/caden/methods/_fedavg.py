"""FedAvg: McMahan, Moore, Ramage, Hampson and y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017.

    the server sends theta to the awake agents;  v = theta, `local_steps` gradient steps
    theta <- mean of the awake agents' v

A server method: one communication up and one down per awake agent.

Sleeping agents: the mean is over awake agents. Biased if agents differ and take several local steps, even with
everyone awake.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_positive
from caden.methods._first_order import awake, local_descent
from caden.methods._registry import STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d) the last theta that each agent received
    theta: Tensor  # (d,)


@register({"alpha": 0.2}, space={"alpha": STEP}, server=True)
def fedavg(alpha: float = 0.3) -> Method:
    """FedAvg, through a server; biased if agents differ and take several local steps.

    Args:
        alpha: local step size.

    Reference: McMahan, Moore, Ramage, Hampson and y Arcas, AISTATS 2017.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.fedavg(0.2), problem, graph, rounds=200)
    >>> bool((result.mean - problem.solution).norm() < 0.5)
    True
    """
    require_positive("alpha", alpha)

    def init(x: Tensor, round: Round) -> State:
        return State(x, round.average(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        x = awake(round, state.theta, state.x)
        theta = round.average(local_descent(round, x, alpha, x * 0))
        return State(awake(round, theta, x), theta), Info()

    return Method(init, step, "fedavg")
