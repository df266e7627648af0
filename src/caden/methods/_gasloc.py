"""GASLoC: Cagnasso, Belilovsky and Oyallon, "Unifying local communications and local updates for LLM pretraining",
arXiv:2606.11081, 2026 (the rule as secondary sources give it; I - W is the weighted Laplacian).

    x' = x;  `local_steps` gradient steps of size alpha
    v = x + eta (x' - x);  send v
    x <- v - weight (v - W v) + gamma (v - v_old);  v_old <- v          v_old starts at x

W is that of the graph, or of a random matching of its edges, drawn anew in every round (`pairs`). One communication per
directed edge and round, or one per agent of a pair. With one local step, eta = weight = 1 and gamma = 0 it is
x <- W (x - alpha grad f(x)).

Biased: gamma leaves the limit alone, while more local steps and larger alpha move it away from the minimiser.

Sleeping agents: W is doubly stochastic on the awake subgraph; a sleeper's v_old rests.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_fraction, require_positive
from caden.methods._first_order import awake, local_descent
from caden.methods._gossip import damped_mix, in_random_pairs
from caden.methods._registry import STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    old: Tensor  # (k, d) v_old above


@register({"alpha": 0.02}, space={"alpha": STEP, "gamma": [0.0, 0.3, 0.6], "eta": [0.7, 1.0]})
def gasloc(
    alpha: float = 0.1, eta: float = 1.0, gamma: float = 0.3, weight: float = 1.0, pairs: bool = False
) -> Method:
    """GASLoC: local steps, gossip and momentum of what is sent; biased where data differ.

    Args:
        alpha: local step size; smaller is less biased and slower.
        eta: fraction of the local progress that is applied.
        gamma: momentum of v, in [0, 1).
        weight: weight of the gossip, in (0, 1].
        pairs: meet one random neighbour in each round instead of all.

    Reference: Cagnasso, Belilovsky and Oyallon, arXiv:2606.11081, 2026.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.gasloc(0.005), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 0.3)
    True
    """
    require_positive("alpha", alpha), require_positive("eta", eta)
    require_fraction("gamma", gamma, "[0, 1)")
    require_fraction("weight", weight, "(0, 1]")

    def init(x: Tensor, round: Round) -> State:
        return State(x, x)

    def step(state: State, round: Round) -> tuple[State, Info]:
        v = state.x + eta * (local_descent(round, state.x, alpha, state.x * 0) - state.x)
        mixed = damped_mix(in_random_pairs(round) if pairs else round, v, weight)
        x = awake(round, mixed + gamma * (v - state.old), state.x)
        return State(x, awake(round, v, state.old)), Info()

    return Method(init, step, "gasloc")
