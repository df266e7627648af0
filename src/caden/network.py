"""`Stacked`: all agents in one process, and the operators of a round as sums over the edge list.

Communications are counted here, not by the methods: one d-vector over one directed edge is 1, only awake agents send,
and the initial exchange is free (the paper does not count it either). Nothing is ever of size m x m.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from caden import checkpoint
from caden.core import Edges, Heard, Problem, Round
from caden.errors import CadenError
from caden.graphs import Graph
from caden.messages import ArcHeard, Messages
from caden.schedules import Draw, Links

_SLICE = 1 << 24  # elements of an edge temporary; wider rows are handled in slices of columns


class StackedHeard(NamedTuple):
    """`core.Heard` for rows that lie in memory: the hosted ones, followed by those of other processes."""

    rows: Tensor  # (k, d) what each hosted agent handed in
    fresh: Tensor  # the same and what other processes' awake agents sent now
    sent: Tensor | None  # what all know of each agent; None if somebody asleep never sent anything
    edges: Edges

    def _known(self) -> Tensor:
        if self.sent is None:
            raise CadenError("A sleeper has not sent anything yet: the method must make this broadcast in `init` too.")
        return self.sent

    def _edge_sum(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """sum_j w_ij (v_i - v_j) over edge differences: antisymmetric to the last bit, so rows sum to zero."""
        out = torch.zeros_like(rows)
        width = max(1, _SLICE // max(1, len(self.edges.first)))
        for a in range(0, rows.shape[1], width):
            v = rows[:, a : a + width]
            difference = v[self.edges.first].sub_(v[self.edges.second])
            if weights is not None:
                difference.mul_(weights)
            part = out[:, a : a + width]
            part.index_add_(0, self.edges.first, difference)
            part.index_add_(0, self.edges.second, difference, alpha=-1)
        return out[: self.edges.agents] if self.edges.elsewhere else out

    def laplacian(self) -> Tensor:
        return self._edge_sum(self._known())

    def mix(self, weights: Tensor | None = None) -> Tensor:
        """W v with w_ij on edges whose ends are both awake, the rest of each row's weight on itself.

        `weights` (e,) defaults to Metropolis weights of the awake subgraph, 1 / (1 + max of the awake degrees).
        """
        known = self.fresh if self.sent is None else self.sent  # the same on edges that count, unless compressed
        return self.rows - self._edge_sum(known, self.edges.mixing(self.rows, weights))

    def disagreement(self) -> Tensor:
        rows, edges = self._known(), self.edges
        square = rows.new_zeros(len(edges.first), 1)
        for v in torch.split(rows, max(1, _SLICE // max(1, len(edges.first))), dim=1):
            square += (v[edges.first] - v[edges.second]).square_().sum(1, keepdim=True)
        return edges.sum(square).squeeze(1)

    def ends(self) -> tuple[Tensor, Tensor]:
        rows = self._known()
        return rows[self.edges.first], rows[self.edges.second]


class Stacked:
    """The network of a simulation: hands out rounds, keeps what agents know of each other, counts what is sent.

    It hosts all agents here; a process of a cluster hosts some (`cluster.Ranks`), and meets the others in `_reach`,
    `_swap` and `gather`. What is counted, and who is awake, is of the whole network everywhere.
    """

    def __init__(
        self,
        graph: Graph,
        problem: Problem,
        draw: Draw,
        may_sleep: bool,
        messages: Messages | None = None,
        links: Links | None = None,
        hosted: list[int] | None = None,
    ):
        if hosted is None and graph.agents != problem.agents:
            raise CadenError(f"The graph has {graph.agents} agents but the problem has {problem.agents}.")
        if graph.agents < 2:
            raise CadenError("A network needs at least 2 agents.")
        device = problem.device
        self._graph, self._draw, self._links = graph, draw, links
        self._messages = messages or Messages()
        if links is not None and self._messages.compressed:
            raise CadenError("Compressed differences must all arrive: without `links`.")
        self.ends = torch.from_numpy(graph.edges.T.copy()).to(device)  # (2, |E|) of the whole graph
        self.hosted = torch.arange(graph.agents) if hosted is None else torch.tensor(hosted)
        here = torch.isin(self.ends, self.hosted.to(device)).any(0)
        others = sorted(set(self.ends[:, here].flatten().tolist()) - set(self.hosted.tolist()))
        self.rows = torch.cat([self.hosted, torch.tensor(others, dtype=torch.int64)]).to(device)  # agents known here
        self._edges = here.nonzero().flatten()  # the edges held here, in the graph's order
        place = torch.zeros(graph.agents, dtype=torch.int64, device=device)
        place[self.rows] = torch.arange(len(self.rows), device=device)
        self.first, self.second = place[self.ends[:, self._edges]]
        degree = torch.from_numpy(graph.degrees.copy()).to(device, problem.dtype).unsqueeze(1)
        self._degree = degree[self.hosted.to(device)]
        self.may_sleep = may_sleep or links is not None
        self.known: dict[str, Tensor] = {}  # what agents know of each other, by position in the round
        self.numbers_sent = 0
        self.bytes = self.wire_bytes = 0  # counted per directed edge; what this process really sent to others
        self.rank = 0
        self._dim = problem.dim

    def load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, float]] | None:
        """The checkpoint of a run directory, if it has one."""
        file = folder / "checkpoint.safetensors"
        return checkpoint.load(file) if file.exists() else None

    def save(self, folder: Path, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """Write a checkpoint."""
        checkpoint.save(folder / "checkpoint.safetensors", tensors, numbers)

    def _reach(self, rows: Tensor, active: Tensor) -> Tensor:
        """(k, d) -> (rows known here, d): hosted rows, and what awake agents of other processes sent."""
        return rows

    def _swap(self, messages: Tensor, active: Tensor) -> Tensor:
        """(2e, d) at each arc what its owner sends -> what its peer sent."""
        half = len(self.first)  # arc e is owned by first[e], arc e + half by second[e]: the reverse of the other
        return torch.cat([messages[half:], messages[:half]])

    def gather(self, rows: Tensor) -> Tensor:
        """(k, ...) of the hosted agents -> (m, ...) of all, in their order."""
        return rows

    def _largest(self, values: Tensor) -> Tensor:
        """(k,) -> () the largest value of all agents."""
        return self.gather(values).max()

    def reduce(self, values: Sequence[float], how: str) -> list[float]:
        """The "max" or the "sum" of each number over all processes."""
        return list(values)

    @property
    def communications(self) -> float:
        """d-vectors sent over directed edges so far; a fraction only if scalars were sent too."""
        whole, rest = divmod(self.numbers_sent, self._dim)
        return whole if rest == 0 else self.numbers_sent / self._dim

    def _deliver(
        self, channel: str, number: int, index: int, messages: Tensor, spoke: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Arc by arc: the newest message that its owner has, and whether one came in this round.

        `messages` (2e, d) is what peers say now where they `spoke` (2e, 1); `before` holds if none ever came.
        """
        model, arcs = self._messages, len(messages)
        if index < 0:
            self.known[channel] = messages
            return messages, spoke
        through = spoke & model.arrives(self._draw, index, number, arcs).to(spoke.device)
        known, came = self.known.get(channel, before), torch.zeros_like(spoke)
        if model.delay == 0:
            self.known[channel] = torch.where(through, messages, known)
            return self.known[channel], through
        late = model.takes(self._draw, index, number, arcs).to(spoke.device)
        depth = model.delay + 1
        queue = self.known.setdefault(f"{channel}.queue", messages.new_zeros(depth, arcs, messages.shape[1]))
        due = self.known.setdefault(f"{channel}.due", torch.full((depth, arcs, 1), -1, device=spoke.device))
        newest = self.known.get(f"{channel}.newest", torch.full((arcs, 1), -1, device=spoke.device))
        sent = self.known.setdefault(f"{channel}.sent", torch.full((depth,), -1, device=spoke.device))

        def collect(slot: int) -> None:
            nonlocal known, came, newest
            hit = (due[slot] >= 0) & (due[slot] <= index)
            due[slot] = torch.where(hit, -1, due[slot])
            hit &= sent[slot] > newest
            known, newest, came = torch.where(hit, queue[slot], known), torch.where(hit, sent[slot], newest), came | hit

        for slot in sent.argsort().tolist():
            collect(slot)
        here = index % depth
        queue[here], due[here], sent[here] = messages, torch.where(through, index + late, -1), index
        collect(here)
        self.known[channel], self.known[f"{channel}.newest"] = known, newest
        return known, came

    def _meet(self, index: int, awake: Tensor) -> tuple[Edges, int]:
        """The edges of a round in which the agents `awake` (m, 1) take part, and how many ends of edges speak."""
        both = awake[self.ends]  # (2, |E|, 1)
        if self._links is not None and index >= 0:
            both = both & self._links(index).to(both.device).unsqueeze(1)
        degree = torch.zeros(len(awake), 1, dtype=torch.int64, device=both.device)
        for end in self.ends:
            degree.index_add_(0, end, both.all(0).long())
        first, second = both[:, self._edges]
        elsewhere = len(self.rows) - len(self.hosted)
        edges = Edges(self.first, self.second, first, second, len(self.hosted), degree[self.rows], elsewhere)
        return edges, int(both.sum())

    @cached_property
    def _all_meet(self) -> tuple[Edges, int]:
        return self._meet(-1, torch.ones(self._graph.agents, 1, dtype=torch.bool, device=self.ends.device))

    def round(
        self, index: int, active: Tensor, work: Tensor, problem: Problem, curvature: Tensor | None = None
    ) -> Round:
        """The context of one round; `active` (m,) bool, `work` (m,)."""
        model, by_arc = self._messages, self._messages.unreliable or self._links is not None
        everybody = active.to(problem.device).unsqueeze(1)  # (m, 1)
        awake = everybody[self.rows[: len(self.hosted)]]  # (k, 1)
        everyone = bool(active.all())
        edges, sending = self._meet(index, everybody) if self._links or not everyone else self._all_meet
        first, second = edges.awake_first, edges.awake_second
        exchanges = 0

        def count(messages: int, numbers: int, size: int) -> None:
            if index >= 0:
                self.numbers_sent += messages * numbers
                self.bytes += messages * size

        def encode(channel: str, rows: Tensor, speaking: Tensor, messages: int) -> Tensor:
            """What everybody knows of the rows after they were sent, compressed if that is the model."""
            width, size = rows.shape[1], rows.shape[1] * rows.element_size()
            if not model.compressed:
                count(messages, width, size)
                return rows
            before = self.known.get(f"{channel}.public")
            if before is None:
                count(messages, width, size)
                public = torch.where(speaking, rows, 0)
            else:
                count(messages, width, model.size(width, rows.element_size()))
                public = torch.where(speaking, before + model.compress(rows - before), before)
            self.known[f"{channel}.public"] = public
            return public

        def number() -> int:
            nonlocal exchanges
            exchanges += 1
            return exchanges - 1

        def broadcast(rows: Tensor) -> Heard:
            turn = number()
            channel = f"broadcast{turn}"
            public = encode(channel, rows, awake, sending)
            if by_arc:
                peers, own = rows[torch.cat([self.second, self.first])], rows[edges.owner()]
                # Of a peer that was never heard an agent knows nothing but itself.
                known, came = self._deliver(channel, turn, index, peers, torch.cat([second, first]), own)
                fresh = came & torch.cat([first, second])
                return ArcHeard(rows, known, fresh, edges, agreed=index < 0 or not model.unreliable)
            fresh = self._reach(public, active)
            if not self.may_sleep or model.compressed:
                return StackedHeard(rows, fresh, fresh, edges)
            if everyone:
                self.known[channel] = fresh.clone()
            elif channel in self.known:
                self.known[channel] = torch.where(everybody[self.rows], fresh, self.known[channel])
            return StackedHeard(rows, fresh, self.known.get(channel), edges)

        def exchange(messages: Tensor) -> tuple[Tensor, Tensor]:
            turn = number()
            messages = encode(f"exchange{turn}", messages, torch.cat([first, second]), sending)
            received = self._swap(messages, active)
            spoke = torch.cat([second, first])  # (2e, 1) bool at each arc's owner: its peer speaks
            if not model.unreliable:
                return received, spoke
            return self._deliver(f"exchange{turn}", turn, index, received, spoke, received)

        def average(rows: Tensor) -> Tensor:
            if model.unreliable or model.compressed or self._links is not None:
                raise CadenError(
                    "This method averages through a server, not over the graph: use no `messages` or `links`."
                )
            chosen = self.gather(rows)[active.to(rows.device)]
            count(2 * len(chosen), rows.shape[1], rows.shape[1] * rows.element_size())  # up to the server, down again
            return chosen.mean(0)

        def maximum(values: Tensor) -> Tensor:
            # Flooding: as many scalar exchanges as the longest path has edges.
            if index >= 0:
                count(2 * len(self._graph.edges) * self._graph.diameter, 1, values.element_size())
            return self._largest(values)

        def uniform(label: str) -> float:
            return float(self._draw.uniform(f"common/{label}", index, count=1)[0])

        return Round(
            index=index,
            active=awake,
            awake=int(active.sum()),
            work=(work * active)[self.hosted].to(problem.device),
            degree=self._degree,
            problem=problem,
            edges=edges,
            graph=self._graph,
            may_sleep=self.may_sleep,
            curvature=curvature,
            broadcast=broadcast,
            exchange=exchange,
            average=average,
            maximum=maximum,
            uniform=uniform,
        )

    def buffers(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        return dict(self.known)

    def restore(self, buffers: dict[str, Tensor], numbers_sent: int, sent_bytes: int) -> None:
        """Take back what `buffers` gave."""
        self.known = {name: rows.to(self.first.device) for name, rows in buffers.items()}
        self.numbers_sent, self.bytes = numbers_sent, sent_bytes
