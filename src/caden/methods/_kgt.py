"""K-GT: Liu, Lin, Koloskova and Stich, "Decentralized gradient tracking with local steps", Optim. Methods Softw., 2024.

    v = x;  K times  v <- v - alpha (grad f(v) + c)
    z = (x - v) / (K alpha);  c <- c - z + W z;  x <- W (x - gamma K alpha z)

K is the agent's number of local steps. Two communications per directed edge and round. c starts at 0 here, and in the
paper at the mean of all agents' gradients minus the own one (`start = "gradients"`), which takes a mean through a
server before the first round.

Sleeping agents: W is doubly stochastic on the awake subgraph, sum c = 0 in every round; exact. Unequal numbers of local
steps make it biased: use the same number for all agents.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_choice, require_positive
from caden.methods._first_order import local_descent
from caden.methods._registry import BROADCAST, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    c: Tensor  # (k, d)


@register({"alpha": 0.1}, BROADCAST, {"alpha": STEP, "gamma": [0.5, 0.75, 1.0], "start": ["zero", "gradients"]})
def kgt(alpha: float = 0.1, gamma: float = 1.0, start: str = "zero") -> Method:
    """K-GT: gradient tracking with local steps, equally many for all agents.

    Args:
        alpha: local step size.
        gamma: fraction of the local progress that is applied.
        start: of the correction c: "zero", or "gradients" for the mean gradient minus the own one, as published.

    Reference: Liu, Lin, Koloskova and Stich, Optim. Methods Softw., 2024.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.kgt(0.1), problem, graph, rounds=400)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha), require_positive("gamma", gamma)
    require_choice("start", start, ("zero", "gradients"))

    def init(x: Tensor, round: Round) -> State:
        if start == "zero":
            return State(x, x * 0)
        gradient = round.problem.value_and_grad(x)[1]
        return State(x, round.average(gradient) - gradient)

    def step(state: State, round: Round) -> tuple[State, Info]:
        moved = state.x - local_descent(round, state.x, alpha, state.c)
        z = moved / (round.work.clamp(min=1).unsqueeze(1).to(moved) * alpha)
        c = state.c - z + round.broadcast(z).mix()
        x = round.broadcast(state.x - gamma * moved).mix()
        return State(x, c), Info()

    return Method(init, step, "kgt")
