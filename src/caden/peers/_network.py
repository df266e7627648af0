"""One agent's part of the network; its neighbours are reached over a `Link`.

A message has a version. In lockstep it numbers the exchanges of all rounds, and an agent waits for the one that the
exchange asks for. Running free it takes the newest that has come and never waits; version 0 is its sender's start, and
version t what the sender's step t said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from caden.core import Heard, Problem, Round
from caden.errors import CadenError
from caden.graphs import Graph
from caden.network import Stacked, StackedHeard
from caden.schedules import Draw

LANES = 1 << 20  # versions of a round in lockstep; the second half is for what is agreed on after it


class Link(Protocol):
    """What a peer asks of its connection to its neighbours."""

    def publish(self, version: int, rows: Mapping[int, Tensor]) -> None:
        """Offer a row to each neighbour; waits for nobody."""

    def wait(self, neighbour: int, version: int, like: Tensor) -> Tensor:
        """The neighbour's row of exactly this version."""

    def members(self, step: int) -> set[int]:
        """The neighbours that count after this step."""

    def read(self, step: int) -> dict[int, tuple[int, Tensor]]:
        """The newest version and row of each neighbour that was ever heard."""


class Peer(Stacked):
    """The network as one agent sees it."""

    def __init__(self, graph: Graph, problem: Problem, draw: Draw, may_sleep: bool, agent: int, link: Link):
        super().__init__(graph, problem, draw, may_sleep, hosted=[agent])
        self.agent, self._link = agent, link
        self.neighbours = self.rows[1:].tolist()
        half = len(self.first)
        self._arc = {  # to a neighbour: the arc that this agent owns
            self.neighbours[max(a, b) - 1]: edge + (half if b == 0 else 0)
            for edge, (a, b) in enumerate(zip(self.first.tolist(), self.second.tolist()))
        }
        self.quiet = False  # say and hear nothing: for the shape of a state that a checkpoint will fill

    def gather(self, rows: Tensor) -> Tensor:
        raise CadenError("This method averages through a server, and peers have none.")


class Lockstep(Peer):
    """Exact rounds: the same numbers as in the simulator."""

    _version = 0

    def round(
        self, index: int, active: Tensor, work: Tensor, problem: Problem, curvature: Tensor | None = None
    ) -> Round:
        self._version = (index + 1) * LANES
        return super().round(index, active, work, problem, curvature)

    def _trade(self, out: Mapping[int, Tensor], active: Tensor, like: Tensor) -> dict[int, Tensor]:
        """Publish if awake, and collect what awake neighbours published in this exchange."""
        version, self._version = self._version, self._version + 1
        if self.quiet:
            return {}
        if bool(active[self.agent]):
            self._link.publish(version, out)
        return {j: self._link.wait(j, version, like) for j in self.neighbours if bool(active[j])}

    def _reach(self, rows: Tensor, active: Tensor) -> Tensor:
        found = rows.new_zeros(len(self.rows), rows.shape[1])
        found[0] = rows[0]
        for j, row in self._trade(dict.fromkeys(self.neighbours, rows[0]), active, rows[0]).items():
            found[1 + self.neighbours.index(j)] = row
        return found

    def _swap(self, messages: Tensor, active: Tensor) -> Tensor:
        received = super()._swap(messages, active)
        for j, row in self._trade({j: messages[a] for j, a in self._arc.items()}, active, messages[0]).items():
            received[self._arc[j]] = row
        return received

    def _largest(self, values: Tensor) -> Tensor:
        return self._flood(values.max().reshape(1))[0]

    def _flood(self, best: Tensor) -> Tensor:
        """After as many exchanges as the longest path has edges, all know the largest of each number."""
        everyone = torch.ones(self._graph.agents, dtype=torch.bool)
        for _ in range(self._graph.diameter):
            heard = self._trade(dict.fromkeys(self.neighbours, best), everyone, best)
            best = torch.stack([best, *heard.values()]).amax(0)
        return best

    def agree(self, rounds: int, *values: float) -> list[float]:
        """The largest of all agents' numbers after so many rounds."""
        self._version = rounds * LANES + LANES // 2
        largest: list[float] = self._flood(torch.tensor(values, dtype=torch.float64)).tolist()
        return largest


class Free(Peer):
    """Everyone at their own pace, for methods whose rounds are one exchange over arcs.

    A neighbour that never spoke, or has been silent for too long, does not count: its arcs are left out of all sums,
    and the agent has one neighbour less.
    """

    def __init__(self, graph: Graph, problem: Problem, draw: Draw, agent: int, link: Link, clip: float | None = None):
        super().__init__(graph, problem, draw, True, agent, link)
        self._clip = clip
        self.known["versions"] = torch.full((graph.agents,), -1)  # newest version taken from each neighbour
        self.known["members"] = torch.ones(graph.agents, dtype=torch.bool)  # who counts in the next step
        self.fresh: dict[int, int] = {}  # versions that the last exchange brought

    @property
    def members(self) -> set[int]:
        """The neighbours that count in the next step; settled at the end of the last one, for the checkpoint."""
        return {j for j in self.neighbours if bool(self.known["members"][j])}

    def round(
        self, index: int, active: Tensor, work: Tensor, problem: Problem, curvature: Tensor | None = None
    ) -> Round:
        members = self.members
        base, exchanges = super().round(index, active, work, problem, curvature), 0
        first, second = base.edges.first.clone(), base.edges.second.clone()
        for j, arc in self._arc.items():
            if j not in members:  # both ends become the row of the absent, which no sum returns
                edge = arc % len(first)
                first[edge] = second[edge] = 1 + self.neighbours.index(j)
        edges = replace(base.edges, first=first, second=second)

        def letters() -> dict[int, Tensor]:
            """What came since the last time."""
            found: dict[int, Tensor] = {}
            versions, self.fresh = self.known["versions"].clone(), {}
            if self.quiet:
                return found
            for j, (version, row) in self._link.read(index).items():
                if version > int(versions[j]) and (version == 0) == (
                    index < 0
                ):  # a start is no message, nor the reverse
                    self.fresh[j] = versions[j] = version
                    found[j] = row
            here = torch.zeros_like(self.known["members"])
            here[sorted(self._link.members(index))] = True
            self.known |= {"versions": versions, "members": here}
            return found

        def broadcast(rows: Tensor) -> Heard:
            if index >= 0:
                raise refusal
            if not self.quiet:
                self._link.publish(0, dict.fromkeys(self.neighbours, rows[0]))
            known = rows.expand(len(self.rows), -1).clone()  # of a peer that was not heard an agent knows only itself
            for j, row in letters().items():
                known[1 + self.neighbours.index(j)] = row
            return StackedHeard(rows, known, known, base.edges)

        def exchange(messages: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal exchanges
            exchanges += 1
            if exchanges > 1 or index < 0:
                raise refusal
            self._link.publish(index + 1, {j: messages[a] for j, a in self._arc.items()})
            size = messages.shape[1]
            self.numbers_sent += len(self.neighbours) * size
            self.bytes += len(self.neighbours) * size * messages.element_size()
            received = torch.zeros_like(messages)
            arrived = torch.zeros(len(messages), 1, dtype=torch.bool, device=messages.device)
            for j, row in letters().items():
                received[self._arc[j]] = self._shortened(j, row)
                arrived[self._arc[j]] = True
            return received, arrived

        def refuse(*_: object) -> Tensor:
            raise refusal

        refusal = CadenError(
            "Free-running peers need a method whose rounds are a single exchange over arcs (radmm, lt_admm); "
            'others run with fleet.mode = "lockstep".'
        )
        degree = torch.full_like(base.degree, len(members))
        return base._replace(
            degree=degree, edges=edges, broadcast=broadcast, exchange=exchange, average=refuse, maximum=refuse
        )

    def _shortened(self, neighbour: int, row: Tensor) -> Tensor:
        """The message with its change cut to `clip`, if there is one."""
        if self._clip is None:
            return row
        last = self.known.get(f"last.{neighbour}")
        if last is not None:
            change = row - last
            row = last + change * min(1.0, self._clip / max(float(torch.linalg.vector_norm(change)), 1e-300))
        self.known[f"last.{neighbour}"] = row.clone()
        return row
