"""Transports of a process that runs one agent and reaches its neighbours over a `Link`.

Every message has a version. In lockstep, versions number the exchanges of all rounds, and an agent waits for the
version of the current exchange. A free-running agent takes the newest message that has come and never waits. There,
version 0 of a sender's life (`wire.LIFE`) is its start and version t is the message of its step t.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import networkx as nx
import torch
from torch import Tensor

from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.layout import Layout
from caden.networks.peers.wire import LIFE
from caden.networks.transport import Transport

HEADER = 8  # free: numbers that may travel with a row
LANES = 1 << 20  # versions per round in lockstep; the second half is for the agreement after the round
KEPT_ROUNDS = 2  # lockstep: rounds whose rows can still be fetched, besides the current one

Path = list[tuple[int, int]]  # versions that were fetched one after the other, each with its base (-1: whole)


class Received(NamedTuple):
    """The newest row of a neighbour, and how it came about since the last one that was read."""

    version: int
    row: Tensor
    path: Path


class Link(Protocol):
    """The connection of a peer to its neighbours."""

    def publish(self, version: int, rows: Mapping[int, Tensor]) -> None:
        """Offer a row to each neighbour without waiting for any of them."""

    def wait(self, neighbour: int, version: int, like: Tensor) -> Tensor:
        """Wait for the neighbour's row of exactly this version, and return it."""

    def life(self, step: int, own: int) -> int:
        """Return the life in which this step is published: `own`, or a later one if steps were lost."""

    def members(self, step: int) -> set[int]:
        """Return the neighbours that count after this step."""

    def read(self, step: int) -> dict[int, Received]:
        """Return the newest row of each neighbour that was ever heard."""


def own_arcs(layout: Layout) -> dict[int, int]:
    """Return {neighbour: arc} for the arcs that the single hosted agent owns."""
    ends = enumerate(zip(layout.first.tolist(), layout.second.tolist()))
    rows, half = layout.rows.tolist(), len(layout.edges)
    return {rows[max(a, b)]: edge + (half if b == 0 else 0) for edge, (a, b) in ends}


def _padded(row: Tensor, zeros: int) -> Tensor:
    """Return the row with zeros after it: all rows of free-running peers have one length."""
    return torch.cat([row, row.new_zeros(zeros)])


class Lockstep(Transport):
    """The transport of exact rounds: the same numbers as in the simulator."""

    quiet = False  # True: send and receive nothing, to build a state that a checkpoint will fill

    def __init__(self, agent: int, link: Link):
        self._agent, self._link, self._version = agent, link, 0

    def hosts(self, graph: Graph) -> list[int] | None:
        return [self._agent]

    def connect(self, layout: Layout, dim: int) -> None:
        self._layout, self._arc = layout, own_arcs(layout)
        self.neighbours = layout.rows[1:].tolist()
        self._waiters = ThreadPoolExecutor(len(self.neighbours) or 1)  # one per neighbour: their latencies overlap

    def begin_round(self, index: int) -> None:
        self._version = (index + 1) * LANES

    def _publish_and_collect(
        self, out: Mapping[int, Tensor], awaited: Sequence[int], like: Tensor
    ) -> dict[int, Tensor]:
        """Publish a row to some neighbours, and return what the awaited ones published in this exchange."""
        version, self._version = self._version, self._version + 1
        if self.quiet:
            return {}
        if out:
            self._link.publish(version, out)
        return dict(zip(awaited, self._waiters.map(lambda j: self._link.wait(j, version, like), awaited)))

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        known = rows.new_zeros(len(self._layout.rows), rows.shape[1])
        known[0] = rows[0]
        out = dict.fromkeys(self.neighbours, rows[0]) if bool(active[self._agent]) else {}
        awaited = [j for j in self.neighbours if bool(active[j])]
        for j, row in self._publish_and_collect(out, awaited, rows[0]).items():
            known[1 + self.neighbours.index(j)] = row
        return known

    def exchange_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> tuple[Tensor, Tensor | None]:
        received = self._layout.reverse(arcs)
        out = {j: arcs[a] for j, a in self._arc.items() if bool(sends[a])}
        awaited = [j for j, a in self._arc.items() if bool(comes[a])]
        for j, row in self._publish_and_collect(out, awaited, arcs[0]).items():
            received[self._arc[j]] = row
        return received, None

    def gather(self, rows: Tensor) -> Tensor:
        raise CadenError("This method averages through a server, which peers do not have: choose another method.")

    def largest(self, values: Tensor) -> Tensor:
        return self._flood_maximum(values.max().reshape(1))[0]

    def _flood_maximum(self, best: Tensor) -> Tensor:
        """Return the largest of each number over all agents, after as many exchanges as the diameter."""
        for _ in range(self._layout.graph.diameter):
            heard = self._publish_and_collect(dict.fromkeys(self.neighbours, best), self.neighbours, best)
            best = torch.stack([best, *heard.values()]).amax(0)
        return best

    def mean(self, row: Tensor, rounds: int) -> Tensor:
        """Return the mean of the rows of all agents, after the given number of rounds.

        The rows are added up along a tree towards agent 0, and their mean comes back.
        """
        self._version = rounds * LANES + 3 * LANES // 4
        graph = self._layout.graph.to_networkx()
        parent, depth = dict(nx.bfs_predecessors(graph, 0)), nx.single_source_shortest_path_length(graph, 0)
        children = [j for j in self.neighbours if parent.get(j) == self._agent]
        own, last, above = depth[self._agent], max(depth.values()), parent.get(self._agent, -1)
        total = row
        for level in range(last, 0, -1):
            heard = self._publish_and_collect(
                {above: total} if own == level else {}, children if own == level - 1 else [], row
            )
            total = torch.stack([total, *heard.values()]).sum(0)
        mean = total / len(depth)
        for level in range(last):
            heard = self._publish_and_collect(
                dict.fromkeys(children, mean) if own == level else {}, [above] if own == level + 1 else [], row
            )
            mean = heard.get(above, mean)
        return mean

    def agree(self, rounds: int, *values: float) -> list[float]:
        """Return the largest of each number over all agents, after the given number of rounds."""
        self._version = rounds * LANES + LANES // 2
        largest: list[float] = self._flood_maximum(torch.tensor(values, dtype=torch.float64)).tolist()
        return largest


class Free(Transport):
    """The transport of peers that run at their own pace, for methods whose rounds are one exchange over arcs.

    A neighbour that was never heard, or has been silent for too long, does not count: its arcs are left out of all
    sums, and the agent has one neighbour fewer.
    """

    sees_only_itself = True
    quiet = False  # as in lockstep

    def __init__(self, agent: int, link: Link, clip: float | None = None):
        self._agent, self._link, self._clip = agent, link, clip
        self._index, self._exchanges = -1, 0
        self.mark = 0.0  # of a model: travels with every message, and those with another one are not used
        self.fresh: dict[int, int] = {}  # {neighbour: version} received in the last exchange
        self.paths: dict[int, Path] = {}  # {neighbour: how it came about}
        self._untaken: dict[int, Path] = {}

    def hosts(self, graph: Graph) -> list[int] | None:
        return [self._agent]

    def connect(self, layout: Layout, dim: int) -> None:
        self._layout, self._arc, self._dim = layout, own_arcs(layout), dim
        self.neighbours = layout.rows[1:].tolist()
        self._known = {
            "versions": torch.full((layout.graph.agents,), -1),  # newest version taken from each neighbour
            "members": torch.ones(layout.graph.agents, dtype=torch.bool),  # who counts in the next step
            "life": torch.zeros((), dtype=torch.int64),
        }

    @property
    def life(self) -> int:
        """How often this agent has lost steps that its neighbours had seen."""
        return int(self._known["life"])

    @property
    def members(self) -> set[int]:
        """The neighbours that count in the next step, fixed at the end of the last one for the checkpoint."""
        return {j for j in self.neighbours if bool(self._known["members"][j])}

    def absent(self) -> list[int]:
        members = self.members
        return [row for row, j in enumerate(self.neighbours, 1) if j not in members]

    def begin_round(self, index: int) -> None:
        self._index, self._exchanges = index, 0

    def _take_new_rows(self) -> dict[int, Tensor]:
        """Return the rows that arrived since the last call."""
        new_rows: dict[int, Tensor] = {}
        versions, self.fresh, self.paths = self._known["versions"].clone(), {}, {}
        if self.quiet:
            return new_rows
        for j, (version, row, path) in self._link.read(self._index).items():
            if self.mark and float(row[-1]) != self.mark:
                if self._index >= 0:
                    continue  # an agent that came later; it is told so itself
                raise CadenError(f"Agent {j} has another model: names and shapes of all parameters must be the same.")
            before = [] if path and path[0][1] < 0 else self._untaken.get(j, [])  # a whole row needs nothing before it
            self._untaken[j] = [*before, *path]
            is_start = version % LIFE == 0  # a start is not a message of a step, nor the reverse
            if version > int(versions[j]) and is_start == (self._index < 0):
                self.fresh[j] = versions[j] = version
                self.paths[j], new_rows[j] = self._untaken.pop(j), row
        members = torch.zeros_like(self._known["members"])
        members[sorted(self._link.members(self._index))] = True
        self._known |= {"versions": versions, "members": members}
        return new_rows

    def marked(self, row: Tensor) -> Tensor:
        """Return a row in the length of all messages, with the mark at its end."""
        padded = _padded(row, self._dim + HEADER - len(row))
        padded[-1] = self.mark
        return padded

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        if self._index >= 0:
            raise self._refusal()
        if not self.quiet:
            self._link.publish(0, dict.fromkeys(self.neighbours, self.marked(rows[0])))
        known = rows.expand(len(self._layout.rows), -1).clone()  # its own row stands in for unheard peers
        for j, row in self._take_new_rows().items():
            known[1 + self.neighbours.index(j)] = row[: rows.shape[1]]
        return known

    def exchange_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> tuple[Tensor, Tensor | None]:
        self._exchanges += 1
        if self._exchanges > 1 or self._index < 0:
            raise self._refusal()
        self._known["life"] = torch.tensor(self._link.life(self._index, self.life))
        version, width = self.life * LIFE + self._index + 1, arcs.shape[1]
        self._link.publish(version, {j: self.marked(arcs[a]) for j, a in self._arc.items() if bool(sends[a])})
        received = torch.zeros_like(arcs)
        arrived = torch.zeros(len(arcs), 1, dtype=torch.bool, device=arcs.device)
        for j, row in self._take_new_rows().items():
            received[self._arc[j]] = self._clipped(j, row[:width], arcs[self._arc[j]])
            arrived[self._arc[j]] = True
        return received, arrived

    def _clipped(self, neighbour: int, row: Tensor, own: Tensor) -> Tensor:
        """Return the message with its change limited to `clip`, if set; the first one is compared with our own."""
        if self._clip is None:
            return row
        message, header = row[: self._dim], row[self._dim :]
        last = self._known.get(f"last.{neighbour}", own[: self._dim])
        change = message - last
        message = last + change * min(1.0, self._clip / max(float(torch.linalg.vector_norm(change)), 1e-300))
        self._known[f"last.{neighbour}"] = message.clone()
        return torch.cat([message, header])

    def gather(self, rows: Tensor) -> Tensor:
        raise self._refusal()

    def largest(self, values: Tensor) -> Tensor:
        raise self._refusal()

    def _refusal(self) -> CadenError:
        return CadenError(
            "Free-running peers need a method whose rounds are a single exchange over arcs (caden, caden_gd, radmm, "
            'lt_admm, clipped_gossip); others run with `fleet.mode = "lockstep"`.'
        )

    def buffers(self) -> dict[str, Tensor]:
        return dict(self._known)

    def restore(self, buffers: dict[str, Tensor]) -> None:
        if "life" not in buffers:
            raise CadenError(
                "This peer's checkpoint was written by an older version of caden and cannot be resumed: start a new "
                "fleet run."
            )
        self._known = dict(buffers)
