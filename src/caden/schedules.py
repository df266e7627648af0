"""Which agents are awake, which links are up and how many local steps each agent takes, round by round.

A schedule is a function ``(round, draw) -> number or one value per agent``; its random draws come from `draw`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caden.draws import Draw
from caden.errors import CadenError, require_integer, require_number
from caden.graphs import Graph
from caden.registry import make

Schedule = Callable[[int, Draw], Any]


def switch(first: Any, then: Any, at: int) -> Schedule:
    """`first` before round `at`, otherwise `then`. The paper's "-Red" workload is ``switch(5, 1, at=100)``."""
    require_integer("at", at)
    return lambda round, draw: first if round < at else then


def between(low: int, high: int) -> Schedule:
    """A whole number drawn uniformly from low..high for each agent in each round."""
    if not require_integer("low", low) <= require_integer("high", high):
        raise CadenError(f"`between` needs 0 <= low <= high, got low={low}, high={high}.")
    return lambda round, draw: low + np.floor(draw.uniform("work", round) * (high - low + 1)).astype(int)


def in_turn(parts: int) -> Schedule:
    """Agent (or link) i is up in the rounds t with t = i modulo `parts`."""
    require_integer("parts", parts, least=1)
    return lambda round, draw: np.arange(draw.agents) % parts == round % parts


@dataclass(frozen=True)
class Auto:
    """Local steps until more would not help (`core.Objective`), for methods with a local solver."""

    accuracy: float
    most: int

    def __call__(self, round: int, draw: Draw) -> int:
        return self.most


def auto(accuracy: float = 0.5, most: int = 8) -> Auto:
    """As many local steps as each agent needs for a relative error of `accuracy`, at most `most`."""
    if not 0 < require_number("accuracy", accuracy) < 1:
        raise CadenError(f"`accuracy` must lie in (0, 1), got {accuracy}.")
    return Auto(accuracy, require_integer("most", most, least=1))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "switch": switch,
    "between": between,
    "in_turn": in_turn,
    "auto": auto,
}


def from_spec(spec: Any) -> Any:
    """Turn a TOML value into an argument of `simulate`: a table names a schedule, numbers and lists are unchanged."""
    return make("schedule", SCHEDULES, spec) if isinstance(spec, dict) else spec


def _per_agent(name: str, value: Any, agents: int, unit: str = "agent") -> np.ndarray:
    array = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    if array.ndim == 0:
        array = np.full(agents, array)
    if array.shape != (agents,):
        raise CadenError(
            f"`{name}` must be a number or one value per {unit} ({agents}), got {array.shape[0]} values."
            if array.ndim == 1
            else f"`{name}` must be a number, a sequence or a schedule, got shape {array.shape}."
        )
    if array.dtype.kind not in "biuf":
        raise CadenError(f"`{name}` must consist of numbers, got {value!r}.")
    return array


class Participation:
    """The awake agents of each round: a probability, one per agent, or a schedule of either (or of boolean masks)."""

    name, unit = "participation", "agent"

    def __init__(self, spec: float | Sequence[float] | Schedule, draw: Draw):
        self._draw = draw
        self._schedule: Schedule = spec if callable(spec) else lambda round, draw: spec
        if isinstance(spec, bool):
            raise CadenError(f"`{self.name}` must be a number, a sequence or a schedule, got {spec}.")
        self.may_sleep = callable(spec) or bool((self.probability(0) < 1).any())
        self.everyone = None if self.may_sleep else torch.ones(draw.agents, dtype=torch.bool)

    def _value(self, round: int) -> Any:
        return self._schedule(round, self._draw)

    def probability(self, round: int) -> np.ndarray:
        value = _per_agent(self.name, self._value(round), self._draw.agents, self.unit)
        if value.dtype != bool and not ((value > 0) & (value <= 1)).all():
            raise CadenError(f"`{self.name}` must lie in (0, 1], got {value[~((value > 0) & (value <= 1))][0]}.")
        return value

    def __call__(self, round: int) -> Tensor:
        """Return the (m,) boolean mask of a round."""
        if self.everyone is not None:
            return self.everyone
        value = self.probability(round)
        awake = value if value.dtype == bool else self._draw.uniform(self.name, round) < value
        return torch.from_numpy(np.ascontiguousarray(awake))


class Links(Participation):
    """The edges that are up in each round: as for agents, or a schedule (round, draw) -> graph with some of them."""

    name, unit = "links", "edge"

    def __init__(self, spec: float | Sequence[float] | Schedule, graph: Graph, seed: int):
        self._graph = graph
        super().__init__(spec, Draw(seed, len(graph.edges)))

    @classmethod
    def from_spec(cls, spec: Any, graph: Graph, seed: int) -> Links | None:
        """Return the links, or None if every edge is up in every round."""
        links = None if spec is None else cls(spec, graph, seed)
        return links if links is not None and links.may_sleep else None

    def _value(self, round: int) -> Any:
        value = super()._value(round)
        if not isinstance(value, Graph):
            return value
        run_edges, round_edges = (g.edges[:, 0] * self._graph.agents + g.edges[:, 1] for g in (self._graph, value))
        if value.agents > self._graph.agents or not np.isin(round_edges, run_edges).all():
            raise CadenError("`links` gives a graph with an edge that the run's graph lacks; see `graphs.union`.")
        return np.isin(run_edges, round_edges)


class Workload:
    """The local steps of each agent: a number, one per agent, or a schedule of either; "auto": as many as help."""

    def __init__(self, spec: int | str | Sequence[int] | Schedule, draw: Draw):
        if isinstance(spec, str) and spec != "auto":
            raise CadenError(f'`local_steps` must be a number, a schedule or "auto", got {spec!r}.')
        spec = auto() if isinstance(spec, str) else spec
        self._draw = draw
        self.accuracy = spec.accuracy if isinstance(spec, Auto) else None
        self._schedule: Schedule = spec if callable(spec) else lambda round, draw: spec
        self._constant: Tensor | None = None
        first = self(0)
        if not callable(spec) or isinstance(spec, Auto):
            self._constant = first

    def __call__(self, round: int) -> Tensor:
        """Return the (m,) int64 local steps of a round."""
        if self._constant is not None:
            return self._constant
        value = _per_agent("local_steps", self._schedule(round, self._draw), self._draw.agents)
        if not np.isfinite(value).all() or (value < 0).any() or (value != np.floor(value)).any():
            raise CadenError(f"`local_steps` must be whole numbers of at least 0, got {value.tolist()!r}.")
        return torch.from_numpy(value.astype(np.int64))
