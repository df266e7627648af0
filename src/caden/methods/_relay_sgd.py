"""RelaySGD: Vogels, He, Koloskova, Lin, Karimireddy, Stich and Jaggi, "RelaySum for decentralized deep learning on
heterogeneous data", NeurIPS 2021.

On a spanning tree of the graph. M_ji is what agent i last received from neighbour j: the sum of the models on j's side
of the tree, each as it was when it came past, and c_ji their number; all start at 0.

    v_i = x_i - alpha grad f_i(x_i)
    send to each neighbour j   M_ij = v_i + sum of M_ki over the neighbours k other than j,  c_ij = 1 + those c_ki
    x_i <- (v_i + sum_j M_ji + (m - 1 - sum_j c_ji) x_i^0) / m

So every model counts once, late by its distance in the tree, and models not yet heard of count as the start. One
communication per directed edge of the tree and round, a different one for each neighbour, with c_ij as bytes only. The
tree is a breadth-first one around a central agent, so it depends on the numbers of the agents. The step must be shorter
for trees of larger diameter.

Sleeping agents: neighbours continue with the last sum they received, also when messages are lost; exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_positive
from caden.methods._first_order import awake, refresh
from caden.methods._registry import EVERYTHING, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    start: Tensor  # (k, d) x^0 above
    sums: Tensor  # (2e, d) at arc (i, j): M_ji above
    counts: Tensor  # (2e, 1) c_ji above
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.3}, EVERYTHING, {"alpha": STEP}, free=True)
def relay_sgd(alpha: float = 0.3) -> Method:
    """RelaySGD: models are summed along a spanning tree, so every agent gets the mean of all, with delay.

    Args:
        alpha: step size.

    Reference: Vogels, He, Koloskova, Lin, Karimireddy, Stich and Jaggi, NeurIPS 2021.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.path(6)
    >>> result = caden.simulate(caden.methods.relay_sgd(0.2), problem, graph, rounds=500)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha)

    def init(x: Tensor, round: Round) -> State:
        sums = x.new_zeros(2 * len(round.edges.first), x.shape[1])
        return State(x, x, sums, sums[:, :1].clone(), *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        edges, owner = round.edges, round.edges.owner()
        v = state.x - alpha * state.gradient * round.active
        relayed = (v + edges.arc_sum(state.sums))[owner] - state.sums
        count = (1 + edges.arc_sum(state.counts))[owner] - state.counts
        received, arrived = round.over(round.graph.spanning_tree).exchange(torch.cat([relayed, count], dim=1))
        sums = torch.where(arrived, received[:, :-1], state.sums)
        counts = torch.where(arrived, received[:, -1:], state.counts)
        agents = round.graph.agents
        missing = agents - 1 - edges.arc_sum(counts)
        x = awake(round, (v + edges.arc_sum(sums) + missing * state.start) / agents, state.x)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, state.start, sums, counts, value, gradient), Info(value, gradient)

    return Method(init, step, "relay_sgd")
