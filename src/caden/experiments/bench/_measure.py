"""What is measured: ratios, and rounds of a method."""

import statistics
from typing import Any, NamedTuple

from torch import Tensor

from caden.core import Method, Problem
from caden.engine.options import Conditions
from caden.engine.simulate import prepare
from caden.graphs import Graph

STEPS, MU = 5, 0.1


class Measure(NamedTuple):
    """A ratio, measured several times."""

    name: str
    ratios: list[float]
    goal: str  # "> 0.85": above is good; "< 1.05": below is

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool:
        sign, bound = self.goal.split()
        return self.median >= float(bound) if sign == ">" else self.median <= float(bound)


class Rounds:
    """A method in the middle of a run; a call runs one more round and returns its seconds."""

    def __init__(
        self,
        method: Method,
        problem: Problem,
        graph: Graph,
        x0: Tensor | None = None,
        steps: int = STEPS,
        **conditions: Any,
    ):
        self.run, start = prepare(method, problem, graph, Conditions(local_steps=steps, **conditions), x0=x0)
        self.run.begin(start)

    def __call__(self) -> float:
        before = self.run.seconds
        self.run.step()
        return self.run.seconds - before

    @property
    def x(self) -> Tensor:
        return self.run.state.x  # type: ignore[no-any-return]
