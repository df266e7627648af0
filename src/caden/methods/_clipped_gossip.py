"""Gossip that survives lying neighbours: He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via
ClippedGossip", arXiv:2202.01545, 2022.

    v_i = x_i - alpha grad f_i(x_i);  send v_i
    x_i = v_i + sum_j w_ij clip(v_j - v_i, tau_i),     clip(u, tau) = u min(1, tau / |u|)

tau_i is the distance of the (faulty + 1)-th farthest neighbour (our choice; the paper has several), so whatever up to
`faulty` neighbours send counts no more than what an honest one sends. One communication per directed edge and round.
Biased, like plain gossip (faulty = 0): by the step size, and under attack by how much the agents' data differ, which no
method can avoid. Each agent needs more than twice as many neighbours as may lie.

Sleeping agents: W is doubly stochastic on the awake subgraph; an agent that misses a message uses the last one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Edges, Info, Method, Round
from caden.errors import CadenError, require_integer, require_positive
from caden.methods._first_order import refresh
from caden.methods._registry import STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    known: Tensor  # (2e, d) at arc (i, j): what i last received from j
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.1, "faulty": 0}, space={"alpha": STEP}, free=True)
def clipped_gossip(alpha: float = 0.3, faulty: int = 0) -> Method:
    """Gossip with self-centred clipping, for networks in which some neighbours may lie; biased.

    Args:
        alpha: step size; smaller is less biased and slower.
        faulty: how many neighbours of each agent may lie; 0 is plain gossip.

    Reference: He, Karimireddy and Jaggi, arXiv:2202.01545, 2022.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.complete(6)
    >>> result = caden.simulate(caden.methods.clipped_gossip(0.02, faulty=1), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 0.5)
    True
    """
    require_positive("alpha", alpha), require_integer("faulty", faulty)

    def init(x: Tensor, round: Round) -> State:
        few = int(round.graph.degrees.argmin())
        if faulty and round.graph.degrees[few] <= 2 * faulty:
            raise CadenError(
                f"`faulty` = {faulty} needs at least {2 * faulty + 1} neighbours per agent, but agent {few} has "
                f"{round.graph.degrees[few]}."
            )
        first, second = round.broadcast(x).ends()
        return State(x, torch.cat([second, first]), *round.problem.value_and_grad(x))

    def step(state: State, round: Round) -> tuple[State, Info]:
        edges, owner, weight = round.edges, round.edges.owner(), round.edges.mixing(state.x)
        v = state.x - alpha * state.gradient * round.active
        received, arrived = round.exchange(v[owner])
        known = torch.where(arrived, received, state.known)
        absent = torch.cat([edges.first == edges.second] * 2).unsqueeze(1)
        apart = torch.where(absent, 0, known - v[owner])
        length = torch.linalg.vector_norm(apart, dim=1, keepdim=True)
        shrink = (_radius(edges, length, faulty)[owner] / length).nan_to_num(1).clamp(max=1)
        x = v + edges.arc_sum(torch.cat([weight, weight]) * shrink * apart)
        value, gradient = refresh(round, x, state.value, state.gradient)
        return State(x, known, value, gradient), Info(value, gradient)

    return Method(init, step, "clipped_gossip")


def _radius(edges: Edges, length: Tensor, faulty: int) -> Tensor:
    """Return (k, 1) the (faulty + 1)-th largest length (2e, 1) among the arcs that each agent owns."""
    owner = torch.cat([edges.first, edges.second])
    order = length.squeeze(1).argsort(descending=True)
    order = order[owner[order].argsort(stable=True)]  # by owner, the longest first
    count = torch.bincount(owner, minlength=edges.agents)[: edges.agents]
    radius = length[order[count.cumsum(0) - count + (count - 1).clamp(max=faulty)]]
    return torch.where((count > faulty).unsqueeze(1), radius, 0)  # all neighbours present may be lying
