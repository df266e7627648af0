"""The network: what a round offers to a method, and what is counted. How rows travel is the transport's business.

Communications are counted here, not by the methods: one d-vector over one directed edge is 1, only awake agents send,
and the initial exchange is free (the paper does not count it either). Nothing is ever of size m x m.
"""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from caden.core import Edges, Heard, Problem, Round
from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.heard import HeardArcs, HeardRows
from caden.networks.layout import Layout
from caden.networks.messages import Delivery, Messages
from caden.networks.transport import Memory, Transport
from caden.schedules import Draw, Links


class Network:
    """Hands out rounds, keeps what agents know of each other, counts what is sent by all of them."""

    def __init__(
        self,
        graph: Graph,
        problem: Problem,
        draw: Draw,
        may_sleep: bool,
        messages: Messages | None = None,
        links: Links | None = None,
        transport: Transport | None = None,
    ):
        self.transport: Transport = Memory() if transport is None else transport
        self.layout = Layout(graph, self.transport.hosts(graph), problem.device)
        if problem.agents != self.layout.agents:
            raise CadenError(f"The graph has {graph.agents} agents but the problem has {problem.agents}.")
        if graph.agents < 2:
            raise CadenError("A network needs at least 2 agents.")
        self.graph, self.draw, self.links = graph, draw, links
        self.post = Delivery(messages or Messages(), draw, self.layout)
        if links is not None and self.post.model.compressed:
            raise CadenError("Compressed differences must all arrive: without `links`.")
        self.transport.connect(self.layout)
        self.may_sleep = may_sleep or links is not None
        self.numbers_sent = self.bytes = 0
        self._dim, self._degree = problem.dim, self.layout.degree.to(problem.dtype)

    @property
    def communications(self) -> float:
        """d-vectors sent over directed edges so far; a fraction only if scalars were sent too."""
        whole, rest = divmod(self.numbers_sent, self._dim)
        return whole if rest == 0 else self.numbers_sent / self._dim

    def _edges_of_round(self, index: int, awake: Tensor) -> tuple[Edges, int]:
        """The edges of a round in which the agents `awake` (m, 1) take part, and how many ends of edges speak."""
        layout = self.layout
        both = awake[layout.ends]  # (2, |E|, 1)
        if self.links is not None and index >= 0:
            both = both & self.links(index).to(both.device).unsqueeze(1)
        degree = torch.zeros(len(awake), 1, dtype=torch.int64, device=both.device)
        for end in layout.ends:
            degree.index_add_(0, end, both.all(0).long())
        elsewhere = len(layout.rows) - layout.agents
        first, second = both[:, layout.edges]
        edges = Edges(layout.first, layout.second, first, second, layout.agents, degree[layout.rows], elsewhere)
        return edges, len(layout.edges) if self.transport.sees_only_itself else int(both.sum())

    @cached_property
    def _edges_all_awake(self) -> tuple[Edges, int]:
        return self._edges_of_round(
            -1, torch.ones(self.graph.agents, 1, dtype=torch.bool, device=self.layout.ends.device)
        )

    def round(
        self, index: int, active: Tensor, work: Tensor, problem: Problem, curvature: Tensor | None = None
    ) -> Round:
        """The context of one round; `active` (m,) bool, `work` (m,)."""
        everyone = bool(active.all())
        everybody = active.to(problem.device).unsqueeze(1)  # (m, 1)
        edges, sending = self._edges_of_round(index, everybody) if self.links or not everyone else self._edges_all_awake
        self.transport.begin_round(index)
        on = _Operators(self, index, active, everyone, everybody[self.layout.rows], edges, sending)
        degree, awake = self._degree, int(active.sum())
        if absent := self.transport.absent():
            edges, degree = self._without(absent, edges)
        work = (work * active)[self.layout.hosted].to(problem.device)
        facts = problem, edges, self.graph, self.may_sleep, curvature
        return Round(
            index, on.awake, awake, work, degree, *facts, on.broadcast, on.exchange, on.average, on.maximum, on.uniform
        )

    def _without(self, absent: list[int], edges: Edges) -> tuple[Edges, Tensor]:
        """Edges and degrees without some rows of other processes: both ends of their edges become their own row."""
        first, second = edges.first.clone(), edges.second.clone()
        gone = torch.tensor(absent, device=first.device)
        for here, there in ((edges.first, second), (edges.second, first)):
            lost = torch.isin(here, gone)
            there[lost] = here[lost]
        edges = replace(edges, first=first, second=second)
        return edges, edges.arc_sum(self._degree.new_ones(2 * len(first), 1))

    def buffers(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        return self.post.known | {f"transport.{name}": tensor for name, tensor in self.transport.buffers().items()}

    def restore(self, buffers: dict[str, Tensor], numbers_sent: int, sent_bytes: int) -> None:
        """Take back what `buffers` gave."""
        mine = {name: tensor for name, tensor in buffers.items() if not name.startswith("transport.")}
        self.post.known = {name: tensor.to(self.layout.ends.device) for name, tensor in mine.items()}
        self.transport.restore({n.removeprefix("transport."): t for n, t in buffers.items() if n not in mine})
        self.numbers_sent, self.bytes = numbers_sent, sent_bytes


class _Operators:
    """The operators of one round."""

    def __init__(
        self, network: Network, index: int, active: Tensor, everyone: bool, awake: Tensor, edges: Edges, sending: int
    ):
        self._network, self._post, self._transport = network, network.post, network.transport
        self._index, self._active, self._everyone, self._edges, self._sending = index, active, everyone, edges, sending
        self._awake_rows, self.awake = awake, awake[: network.layout.agents]  # (rows, 1), (k, 1)
        self._exchanges = 0

    def _count(self, messages: int, numbers: int, size: int) -> None:
        if self._index >= 0:
            self._network.numbers_sent += messages * numbers
            self._network.bytes += messages * size

    def _turn(self) -> int:
        self._exchanges += 1
        return self._exchanges - 1

    def _encode(self, channel: str, rows: Tensor, speaking: Tensor) -> Tensor:
        public, size = self._post.encode(channel, rows, speaking)
        self._count(self._sending, rows.shape[1], size)
        return public

    def _remember(self, channel: str, fresh: Tensor) -> Tensor | None:
        """What everybody knows of each row: the last that it sent; None if some never sent anything."""
        known = self._post.known
        if self._everyone:
            known[channel] = fresh.clone()
        elif channel in known:
            known[channel] = torch.where(self._awake_rows, fresh, known[channel])
        return known.get(channel)

    def broadcast(self, rows: Tensor) -> Heard:
        turn, network, model = self._turn(), self._network, self._post.model
        channel = f"broadcast{turn}"
        public = self._encode(channel, rows, self.awake)
        fresh = self._transport.share_rows(public, self._active)
        if model.unreliable or network.links is not None:
            return self._by_arc(channel, turn, rows, fresh)
        elsewhere = network.layout.agents < len(fresh)
        if not network.may_sleep or (model.compressed and not elsewhere):
            return HeardRows(rows, fresh, fresh, self._edges)
        return HeardRows(rows, fresh, self._remember(channel, fresh), self._edges)

    def _by_arc(self, channel: str, turn: int, rows: Tensor, fresh: Tensor) -> Heard:
        edges, unreliable = self._edges, self._post.model.unreliable
        if len(fresh) > len(rows):  # of other processes' sleepers the last row is remembered here
            known_rows = self._remember(f"{channel}.rows", fresh)
            fresh = fresh if known_rows is None else known_rows
        peers, own = fresh[torch.cat([edges.second, edges.first])], rows[edges.owner()]
        spoke = torch.cat([edges.awake_second, edges.awake_first])
        # Of a peer that was never heard an agent knows nothing but itself.
        known, came = self._post.deliver(channel, turn, self._index, peers, spoke, own)
        both = came & torch.cat([edges.awake_first, edges.awake_second])
        return HeardArcs(rows, known, both, edges, None if unreliable and self._index >= 0 else fresh)

    def exchange(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        turn, edges = self._turn(), self._edges
        messages = self._encode(f"exchange{turn}", messages, torch.cat([edges.awake_first, edges.awake_second]))
        received, came = self._transport.exchange_arcs(messages, self._active)
        if came is None:
            came = torch.cat([edges.awake_second, edges.awake_first])  # (2e, 1) at each arc's owner: its peer speaks
        if not self._post.model.unreliable:
            return received, came
        return self._post.deliver(f"exchange{turn}", turn, self._index, received, came, received)

    def average(self, rows: Tensor) -> Tensor:
        model = self._post.model
        if model.unreliable or model.compressed or self._network.links is not None:
            raise CadenError("This method averages through a server, not over the graph: use no `messages` or `links`.")
        chosen = self._transport.gather(rows)[self._active.to(rows.device)]
        self._count(2 * len(chosen), rows.shape[1], rows.shape[1] * rows.element_size())  # up to the server, down again
        return chosen.mean(0)

    def maximum(self, values: Tensor) -> Tensor:
        if self._index >= 0:  # flooding: as many scalar exchanges as the longest path has edges
            graph = self._network.graph
            self._count(2 * len(graph.edges) * graph.diameter, 1, values.element_size())
        return self._transport.largest(values)

    def uniform(self, label: str) -> float:
        return float(self._network.draw.uniform(f"common/{label}", self._index, count=1)[0])
