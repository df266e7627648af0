"""Write your own method: gradient tracking (DIGing) in a dozen lines, with the same interface as all others."""

from typing import NamedTuple

from torch import Tensor

import caden


class State(NamedTuple):
    x: Tensor  # (agents, d): the first field is always x
    tracker: Tensor  # estimate of the mean gradient at each agent
    gradient: Tensor


def gradient_tracking(step_size: float) -> caden.Method:
    def init(x: Tensor, round: caden.Round) -> State:
        gradient = round.problem.value_and_grad(x)[1]
        return State(x, gradient, gradient)

    def step(state: State, round: caden.Round) -> tuple[State, caden.Info]:
        x = round.broadcast(state.x).mix() - step_size * state.tracker
        value, gradient = round.problem.value_and_grad(x)
        tracker = round.broadcast(state.tracker).mix() + gradient - state.gradient
        return State(x, tracker, gradient), caden.Info(value, gradient)

    return caden.Method(init, step, "gradient_tracking")


problem = caden.problems.logistic(agents=12, dim=10, alpha=0.0, l2=0.1, seed=0)
graph = caden.graphs.small_world(12, k=4, p=0.2, seed=0)
for method in (gradient_tracking(0.4), caden.methods.caden(mu_z=0.1)):
    result = caden.simulate(method, problem, graph, rounds=150, tolerance=1e-10)
    last = result.history.iloc[-1]
    print(
        f"{method.name:18s} {last['round']:.0f} rounds, {last.communications:.0f} communications, "
        f"relative error {last.relative_error:.0e}"
    )
