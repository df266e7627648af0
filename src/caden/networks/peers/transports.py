"""One agent per process; its neighbours are reached over a `Link`.

A message has a version. In lockstep it numbers the exchanges of all rounds, and an agent waits for the one that the
exchange asks for. Running free it takes the newest that has come and never waits; version 0 is its sender's start, and
version t what the sender's step t said.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.layout import Layout
from caden.networks.transport import Transport

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


def own_arcs(layout: Layout) -> dict[int, int]:
    """To each neighbour the arc that the one hosted agent owns."""
    ends = enumerate(zip(layout.first.tolist(), layout.second.tolist()))
    rows, half = layout.rows.tolist(), len(layout.edges)
    return {rows[max(a, b)]: edge + (half if b == 0 else 0) for edge, (a, b) in ends}


class Lockstep(Transport):
    """Exact rounds: the same numbers as in the simulator."""

    quiet = False  # say and hear nothing: for the shape of a state that a checkpoint will fill

    def __init__(self, agent: int, link: Link):
        self._agent, self._link, self._version = agent, link, 0

    def hosts(self, graph: Graph) -> list[int] | None:
        return [self._agent]

    def connect(self, layout: Layout) -> None:
        self._layout, self._arc = layout, own_arcs(layout)
        self.neighbours = layout.rows[1:].tolist()
        self._everyone = torch.ones(layout.graph.agents, dtype=torch.bool)

    def begin_round(self, index: int) -> None:
        self._version = (index + 1) * LANES

    def _trade(self, out: Mapping[int, Tensor], active: Tensor, like: Tensor) -> dict[int, Tensor]:
        """Publish if awake, and collect what awake neighbours published in this exchange."""
        version, self._version = self._version, self._version + 1
        if self.quiet:
            return {}
        if bool(active[self._agent]):
            self._link.publish(version, out)
        return {j: self._link.wait(j, version, like) for j in self.neighbours if bool(active[j])}

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        known = rows.new_zeros(len(self._layout.rows), rows.shape[1])
        known[0] = rows[0]
        for j, row in self._trade(dict.fromkeys(self.neighbours, rows[0]), active, rows[0]).items():
            known[1 + self.neighbours.index(j)] = row
        return known

    def exchange_arcs(self, arcs: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
        received = self._layout.reverse(arcs)
        for j, row in self._trade({j: arcs[a] for j, a in self._arc.items()}, active, arcs[0]).items():
            received[self._arc[j]] = row
        return received, None

    def gather(self, rows: Tensor) -> Tensor:
        raise CadenError("This method averages through a server, and peers have none.")

    def largest(self, values: Tensor) -> Tensor:
        return self._flood(values.max().reshape(1))[0]

    def _flood(self, best: Tensor) -> Tensor:
        """After as many exchanges as the longest path has edges, all know the largest of each number."""
        for _ in range(self._layout.graph.diameter):
            heard = self._trade(dict.fromkeys(self.neighbours, best), self._everyone, best)
            best = torch.stack([best, *heard.values()]).amax(0)
        return best

    def agree(self, rounds: int, *values: float) -> list[float]:
        """The largest of all agents' numbers after so many rounds."""
        self._version = rounds * LANES + LANES // 2
        largest: list[float] = self._flood(torch.tensor(values, dtype=torch.float64)).tolist()
        return largest


class Free(Transport):
    """Everyone at their own pace, for methods whose rounds are one exchange over arcs.

    A neighbour that never spoke, or has been silent for too long, does not count: its arcs are left out of all sums,
    and the agent has one neighbour less.
    """

    sees_only_itself = True
    quiet = False  # as in lockstep

    def __init__(self, agent: int, link: Link, clip: float | None = None):
        self._agent, self._link, self._clip = agent, link, clip
        self._index, self._spoken = -1, 0
        self.fresh: dict[int, int] = {}  # versions that the last exchange brought

    def hosts(self, graph: Graph) -> list[int] | None:
        return [self._agent]

    def connect(self, layout: Layout) -> None:
        self._layout, self._arc = layout, own_arcs(layout)
        self.neighbours = layout.rows[1:].tolist()
        self._known = {
            "versions": torch.full((layout.graph.agents,), -1),  # newest version taken from each neighbour
            "members": torch.ones(layout.graph.agents, dtype=torch.bool),  # who counts in the next step
        }

    @property
    def members(self) -> set[int]:
        """The neighbours that count in the next step; settled at the end of the last one, for the checkpoint."""
        return {j for j in self.neighbours if bool(self._known["members"][j])}

    def absent(self) -> list[int]:
        members = self.members
        return [row for row, j in enumerate(self.neighbours, 1) if j not in members]

    def begin_round(self, index: int) -> None:
        self._index, self._spoken = index, 0

    def _letters(self) -> dict[int, Tensor]:
        """What came since the last time."""
        letters: dict[int, Tensor] = {}
        versions, self.fresh = self._known["versions"].clone(), {}
        if self.quiet:
            return letters
        for j, (version, row) in self._link.read(self._index).items():
            a_start = version == 0  # is no message, nor the reverse
            if version > int(versions[j]) and a_start == (self._index < 0):
                self.fresh[j] = versions[j] = version
                letters[j] = row
        here = torch.zeros_like(self._known["members"])
        here[sorted(self._link.members(self._index))] = True
        self._known |= {"versions": versions, "members": here}
        return letters

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        if self._index >= 0:
            raise self._refusal()
        if not self.quiet:
            self._link.publish(0, dict.fromkeys(self.neighbours, rows[0]))
        known = rows.expand(len(self._layout.rows), -1).clone()  # of a peer that was not heard an agent knows itself
        for j, row in self._letters().items():
            known[1 + self.neighbours.index(j)] = row
        return known

    def exchange_arcs(self, arcs: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
        self._spoken += 1
        if self._spoken > 1 or self._index < 0:
            raise self._refusal()
        self._link.publish(self._index + 1, {j: arcs[a] for j, a in self._arc.items()})
        received = torch.zeros_like(arcs)
        arrived = torch.zeros(len(arcs), 1, dtype=torch.bool, device=arcs.device)
        for j, row in self._letters().items():
            received[self._arc[j]] = self._shortened(j, row)
            arrived[self._arc[j]] = True
        return received, arrived

    def _shortened(self, neighbour: int, row: Tensor) -> Tensor:
        """The message with its change cut to `clip`, if there is one."""
        if self._clip is None:
            return row
        last = self._known.get(f"last.{neighbour}")
        if last is not None:
            change = row - last
            row = last + change * min(1.0, self._clip / max(float(torch.linalg.vector_norm(change)), 1e-300))
        self._known[f"last.{neighbour}"] = row.clone()
        return row

    def gather(self, rows: Tensor) -> Tensor:
        raise self._refusal()

    def largest(self, values: Tensor) -> Tensor:
        raise self._refusal()

    def _refusal(self) -> CadenError:
        return CadenError(
            "Free-running peers need a method whose rounds are a single exchange over arcs (radmm, lt_admm); "
            'others run with fleet.mode = "lockstep".'
        )

    def buffers(self) -> dict[str, Tensor]:
        return dict(self._known)

    def restore(self, buffers: dict[str, Tensor]) -> None:
        if "versions" not in buffers:
            raise CadenError(
                "This peer's checkpoint was written by caden 0.1 and cannot be resumed: start the fleet anew."
            )
        self._known = dict(buffers)
