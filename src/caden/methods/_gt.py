"""Gradient tracking: Alghunaim and Yuan, "A unified and refined convergence analysis for non-convex decentralized
learning", IEEE TSP 70, 2022 (ATC and its relatives); DIGing: Nedic, Olshevsky and Shi, "Achieving geometric convergence
for distributed optimization over time-varying graphs", SIAM J. Optim. 27(4), 2017.

With W a mixing matrix, G the stacked gradients and D their change; the tracker g starts at G:

    atc       x <- W (x - alpha g)    g <- W (g + D)
    semi_a    x <- W x - alpha g      g <- W (g + D)
    semi_b    x <- W (x - alpha g)    g <- W g + D
    non_atc   x <- W x - alpha g      g <- W g + D       (DIGing)

Two communications per directed edge and round.

Sleeping agents: W is doubly stochastic on the awake subgraph, so sum g = sum grad f holds in every round; exact.
"""

from typing import NamedTuple

from torch import Tensor

from caden.core import Info, Method, Round
from caden.errors import require_choice, require_positive
from caden.methods._first_order import awake, only_awake, refresh
from caden.methods._registry import BROADCAST, STEP, register


class State(NamedTuple):
    x: Tensor  # (k, d)
    tracker: Tensor  # (k, d) g above
    value: Tensor  # (k,)
    gradient: Tensor  # (k, d)


@register({"alpha": 0.3}, BROADCAST, {"alpha": STEP, "form": ["atc", "semi_b", "non_atc"]})
def gt(alpha: float = 0.3, form: str = "atc") -> Method:
    """Gradient tracking, in ATC, non-ATC and mixed forms.

    Args:
        alpha: step size.
        form: what is mixed, and when: "atc", "semi_a", "semi_b" or "non_atc".

    Reference: Alghunaim and Yuan, IEEE TSP 70, 2022.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.gt(0.3), problem, graph, rounds=300)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    require_positive("alpha", alpha)
    require_choice("form", form, ("atc", "semi_a", "semi_b", "non_atc"))

    def init(x: Tensor, round: Round) -> State:
        value, gradient = round.problem.value_and_grad(x)
        return State(x, gradient, value, gradient)

    def step(state: State, round: Round) -> tuple[State, Info]:
        descent = only_awake(round, alpha * state.tracker)
        if form in ("atc", "semi_b"):
            x = round.broadcast(state.x - descent).mix()
        else:
            x = round.broadcast(state.x).mix() - descent
        value, gradient = refresh(round, x, state.value, state.gradient)
        change = gradient - state.gradient
        if form in ("atc", "semi_a"):
            tracker = round.broadcast(state.tracker + change).mix()
        else:
            tracker = round.broadcast(state.tracker).mix() + change
        return State(x, awake(round, tracker, state.tracker), value, gradient), Info(value, gradient)

    return Method(init, step, "gt")


@register({"alpha": 0.2}, BROADCAST, {"alpha": STEP})
def diging(alpha: float = 0.05) -> Method:
    """DIGing: gradient tracking in its non-ATC form.

    Args:
        alpha: step size.

    Reference: Nedic, Olshevsky and Shi, SIAM J. Optim. 27(4), 2017.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=6, dim=3), caden.graphs.ring(6)
    >>> result = caden.simulate(caden.methods.diging(0.2), problem, graph, rounds=600)
    >>> bool((result.mean - problem.solution).norm() < 1e-6)
    True
    """
    return gt(alpha, "non_atc")._replace(name="diging")
