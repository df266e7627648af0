"""The network: the operators that a round offers to a method, and the counters. The transport moves the rows.

Communications are counted here, not by the methods: one d-vector over one directed edge is 1, only awake agents send,
and the initial exchange is free (the paper does not count it either). No object has size m x m.
"""

import copy
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caden.core import Edges, Heard, Problem, Round
from caden.draws import Draw
from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.copies import ArcCopies, Notice, RowCopies
from caden.networks.heard import HeardArcs, HeardRows
from caden.networks.layout import Layout
from caden.networks.messages import Delivery, Messages
from caden.networks.timers import Timer
from caden.networks.transport import Memory, Transport
from caden.schedules import Links

NOTICE = 1  # bytes that say that an agent is awake but has nothing to send


class Network:
    """A network that creates rounds, stores what agents know of each other, and counts what all of them send."""

    def __init__(
        self,
        graph: Graph,
        problem: Problem,
        draw: Draw,
        may_sleep: bool,
        messages: Messages | None = None,
        links: Links | None = None,
        transport: Transport | None = None,
        timer: Timer | None = None,
    ):
        self.transport: Transport = Memory() if transport is None else transport
        self.timer = timer
        self.layout = Layout(graph, self.transport.hosts(graph), problem.device)
        if problem.agents != self.layout.agents:
            raise CadenError(f"The graph has {graph.agents} agents but the problem has {problem.agents}.")
        if graph.agents < 2:
            raise CadenError(f"A network needs at least 2 agents, got {graph.agents}.")
        self.graph, self.draw, self.links = graph, draw, links
        self.post = Delivery(messages or Messages(), draw, self.layout)
        if links is not None and self.post.model.shared_copies:
            raise CadenError("Copies of what was sent must stay equal: remove `links`, or compression and triggers.")
        self.transport.connect(self.layout, problem.dim)
        self.may_sleep = may_sleep or links is not None or (timer is not None and timer.may_sleep)
        self.lossy = self.post.model.unreliable or self.transport.sees_only_itself or self.transport.late
        self.abridged = self.post.model.abridged
        self.numbers_sent = self.bytes = 0
        self.shares_copies = self.post.model.shared_copies
        self.differs_by_arc = self.post.model.unreliable or links is not None  # what neighbours know of an agent
        self.dim, self._degree = problem.dim, self.layout.degree.to(problem.dtype)
        self._last_work: tuple[Tensor, Tensor] | None = None  # (m,) as asked for, and that of the hosted agents

    @property
    def communications(self) -> int:
        """Vectors of d numbers sent over directed edges so far, in whole vectors."""
        return self.numbers_sent // self.dim

    def edges_of_round(self, index: int, awake: Tensor, chosen: Tensor | None = None) -> tuple[Edges, int]:
        """Return the edges of a round in which the agents `awake` (m, 1) take part, and how many edge ends send.

        `chosen` (|E|,) bool leaves out edges, as `links` do.
        """
        layout = self.layout
        both = awake[layout.ends]  # (2, |E|, 1)
        if chosen is not None:
            both = both & chosen.to(both.device).unsqueeze(1)
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
    def _all_awake(self) -> tuple[Tensor, Edges, int]:
        """The awake rows, edges and sending ends of a round in which everyone takes part."""
        everyone = torch.ones(self.graph.agents, 1, dtype=torch.bool, device=self.layout.ends.device)
        return everyone[self.layout.rows], *self.edges_of_round(-1, everyone)

    def round(
        self,
        index: int,
        active: Tensor,
        work: Tensor,
        problem: Problem,
        curvature: Tensor | None = None,
        accuracy: float | None = None,
        elapsed: float = 0.0,
        awake: int | None = None,
    ) -> Round:
        """Return the context of one round; `active` (m,) bool, of which `awake` are true, `work` (m,)."""
        degree, awake = self._degree, int(active.sum()) if awake is None else awake
        everyone = awake == self.graph.agents
        if everyone and self.links is None:
            awake_rows, edges, sending = self._all_awake
        else:
            is_awake = active.to(problem.device).unsqueeze(1)  # (m, 1)
            awake_rows, (edges, sending) = is_awake[self.layout.rows], self.edges_of_round(index, is_awake)
        self.transport.begin_round(index)
        operators = _Operators(self, index, active, everyone, awake_rows, edges, sending)
        if absent := self.transport.absent():
            edges, degree = self._without_rows(absent, edges)
        work = self._work_here(work, problem) if everyone else (work * active)[self.layout.hosted].to(problem.device)
        facts = problem, edges, self.graph, self.may_sleep, self.lossy, self.abridged, curvature, accuracy
        functions = operators.broadcast, operators.exchange, operators.average, operators.maximum, operators.uniform
        return Round(index, operators.awake, awake, work, degree, *facts, *functions, operators.restrict, elapsed)

    def _work_here(self, work: Tensor, problem: Problem) -> Tensor:
        """Return the hosted agents' work, the same tensor for as long as the same work is asked for."""
        if self._last_work is None or self._last_work[0] is not work:
            self._last_work = work, work[self.layout.hosted].to(problem.device)
        return self._last_work[1]

    def _without_rows(self, absent: list[int], edges: Edges) -> tuple[Edges, Tensor]:
        """Return edges and degrees without the `absent` rows of other processes, whose edges become loops."""
        first, second = edges.first.clone(), edges.second.clone()
        absent_rows = torch.tensor(absent, device=first.device)
        for this_end, other_end in ((edges.first, second), (edges.second, first)):
            is_absent = torch.isin(this_end, absent_rows)
            other_end[is_absent] = this_end[is_absent]
        edges = replace(edges, first=first, second=second)
        return edges, edges.arc_sum(self._degree.new_ones(2 * len(first), 1))

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold."""
        clock = {} if self.timer is None else self.timer.buffers()
        known = self.post.known | {f"transport.{name}": tensor for name, tensor in self.transport.buffers().items()}
        return known | {f"clock.{name}": tensor for name, tensor in clock.items()}

    def restore(self, buffers: dict[str, Tensor], numbers_sent: int, sent_bytes: int) -> None:
        """Restore the tensors that `buffers` returned, and the counters."""
        if self.timer is not None:
            self.timer.restore({n.removeprefix("clock."): t for n, t in buffers.items() if n.startswith("clock.")})
        buffers = {name: tensor for name, tensor in buffers.items() if not name.startswith("clock.")}
        known = {name: tensor for name, tensor in buffers.items() if not name.startswith("transport.")}
        self.post.known = {name: tensor.to(self.layout.ends.device) for name, tensor in known.items()}
        self.transport.restore({n.removeprefix("transport."): t for n, t in buffers.items() if n not in known})
        self.numbers_sent, self.bytes = numbers_sent, sent_bytes


class _Operators:
    """The operators that a method uses in one round."""

    def __init__(
        self, network: Network, index: int, active: Tensor, everyone: bool, awake: Tensor, edges: Edges, sending: int
    ):
        self._network, self._delivery, self._transport = network, network.post, network.transport
        self._index, self._active, self._everyone, self._edges, self._sending = index, active, everyone, edges, sending
        self._awake_rows = awake  # (rows, 1)
        self.awake = awake[: network.layout.agents] if edges.elsewhere else awake  # (k, 1)
        self._exchanges, self._arc_exchanges = count(), count()
        self._some_edges_only = False

    def restrict(self, chosen: np.ndarray) -> dict[str, Any]:
        """Return the edges and the operators of the round on the `chosen` edges, for `Round.over`."""
        if self._transport.sees_only_itself:
            raise CadenError('This method chooses edges, which peers that run free cannot: use mode "lockstep".')
        inner, awake = copy.copy(self), self._active.to(self.awake.device).unsqueeze(1)
        inner._edges, inner._sending = self._network.edges_of_round(self._index, awake, torch.from_numpy(chosen))
        inner._some_edges_only = True
        return {"edges": inner._edges, "broadcast": inner.broadcast, "exchange": inner.exchange}

    def _count(self, messages: int, numbers: int, size: int) -> None:
        if self._index >= 0:
            self._network.numbers_sent += messages * numbers
            self._network.bytes += messages * size

    def _travel(self, sizes: Tensor | float, sends: Tensor | None = None) -> None:
        """Let messages travel over the arcs (2e, 1) that send, by default those whose owners are awake."""
        timer = self._network.timer
        if timer is None or self._index < 0:
            return
        going = self._edges.owner_awake if sends is None else sends
        timer.exchange(self._index, (going * sizes).squeeze(1).double().cpu().numpy())

    def _count_messages(self, whole: Tensor, part: Tensor, width: int, itemsize: int) -> None:
        """Count messages that are sent whole or compressed over arcs (2e, 1), and the notices of those that send none.

        A process counts the arcs of its own agents; ranks add up their counts.
        """
        edges, codec = self._edges, self._delivery.model.codec
        own = (torch.cat([edges.first, edges.second]) < edges.agents).unsqueeze(1)
        awake = edges.owner_awake
        counts = [float((sent & awake & own).sum()) for sent in (whole, part, ~(whole | part))]
        wholes, parts, silent = map(int, self._transport.reduce(counts, "sum"))
        self._count(wholes, width, width * itemsize)
        self._count(parts, width, width * itemsize if codec is None else codec.size(width, itemsize))
        self._count(silent, 0, NOTICE)
        size = width * itemsize if codec is None else codec.size(width, itemsize)
        self._travel(whole * (width * itemsize) + part * size + ~(whole | part) * NOTICE, awake)

    def _remember(self, channel: str, fresh: Tensor) -> Tensor | None:
        """Store and return the row that each agent last sent; None if some have never sent anything."""
        known = self._delivery.known
        if self._everyone:
            known[channel] = fresh.clone()
        elif channel in known:
            known[channel] = torch.where(self._awake_rows, fresh, known[channel])
        return known.get(channel)

    def broadcast(self, rows: Tensor, keep: bool = True) -> Heard:
        exchange, network, copies = next(self._exchanges), self._network, self._network.shares_copies
        channel, width = f"broadcast{exchange}", rows.shape[1]
        if copies and self._delivery.model.unreliable and self._index >= 0:
            raise CadenError(
                "Compressed or triggered broadcasts must all arrive: use a method with arc variables (caden, radmm, "
                "lt_admm), or remove `messages.loss` and `messages.delay`."
            )
        if copies and self._some_edges_only:
            raise CadenError("This method meets some neighbours only, which then lack copies: remove compression.")
        if copies and not network.lossy:
            public = self._broadcast_copies(f"{channel}.public", rows)
            return HeardRows(rows, public, public, self._edges)
        self._count(self._sending, width, width * rows.element_size())
        self._travel(width * rows.element_size())
        fresh = self._transport.share_rows(rows, self._active)
        if not keep:
            return HeardRows(rows, fresh, fresh, self._edges)
        if network.differs_by_arc or self._some_edges_only:
            return self._hear_by_arc(channel, exchange, rows, fresh)
        sent = self._remember(channel, fresh) if network.may_sleep else fresh
        return HeardRows(rows, fresh, sent, self._edges)

    def _broadcast_copies(self, name: str, rows: Tensor) -> Tensor:
        """Return what all know of each agent after the awake ones sent what is new, compressed."""
        known, model, owner = self._delivery.known, self._delivery.model, self._edges.owner()
        spoke, codec, before, first = self.awake, None, known.get(name), name not in known
        if before is None:  # whole rows; the copy of an agent that sleeps begins at 0
            before = rows.new_zeros(len(self._awake_rows), rows.shape[1])
        else:
            spoke, codec = spoke & model.worth_sending(self._index, rows - before[: len(rows)]), model.codec
        speakers, active = self._awake_rows, self._active
        if model.trigger is not None and not first:
            speakers = speakers & self._transport.share_rows(spoke.to(torch.uint8), active).bool()
            active = torch.zeros_like(active)
            active[self._network.layout.rows.cpu()] = speakers.squeeze(1).cpu()
        copies, none = RowCopies(before, codec), torch.zeros_like(spoke)
        whole, part = (spoke, none) if codec is None else (none, spoke)
        self._count_messages(whole[owner], part[owner], rows.shape[1], rows.element_size())
        known[name] = copies.update(self._transport.share_rows(copies.pack(rows, spoke), active), speakers)
        return known[name]

    def _hear_by_arc(self, channel: str, exchange: int, rows: Tensor, fresh: Tensor) -> Heard:
        edges, unreliable = self._edges, self._delivery.model.unreliable
        if len(fresh) > len(rows):  # sleeping agents of other processes are represented by their last row
            known_rows = self._remember(f"{channel}.rows", fresh)
            fresh = fresh if known_rows is None else known_rows
        peers, own = fresh[torch.cat([edges.second, edges.first])], rows[edges.owner()]
        spoke = edges.peer_awake
        # An agent that has never heard from a peer uses its own row instead.
        known, came = self._delivery.deliver(channel, exchange, self._index, peers, spoke, own)
        both = came & edges.owner_awake
        return HeardArcs(rows, known, both, edges, None if unreliable and self._index >= 0 else fresh)

    def exchange(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        exchange, edges, model = next(self._exchanges), self._edges, self._delivery.model
        channel, dim = f"exchange{next(self._arc_exchanges)}", self._network.dim
        sends = edges.owner_awake  # (2e, 1) whether each arc's owner sends
        comes = edges.peer_awake  # ... whether its peer does
        header, itemsize = messages.shape[1] - dim, messages.element_size()
        elsewhere = self._transport.sees_only_itself or self._transport.packs
        copies_here = self._network.shares_copies and not elsewhere
        if copies_here and header:
            self._count(self._sending, 0, header * itemsize)
        if copies_here and self._index < 0:
            self._exchange_copies(channel, exchange, messages, sends, comes)
        if self._index < 0:
            return torch.zeros_like(messages), torch.zeros_like(comes)
        if copies_here:
            return self._exchange_copies(channel, exchange, messages, sends, comes)
        codec = model.codec  # with one, it is the link of a free peer that compresses
        size = (dim * itemsize if codec is None else codec.size(dim, itemsize)) + header * itemsize
        self._travel((dim + header) * itemsize)
        received, came = self._transport.exchange_arcs(messages, sends, comes)
        messages_sent, bytes_sent = self._transport.posted or (self._sending, self._sending * size)
        self._count(messages_sent, dim, 0)
        self._network.bytes += bytes_sent
        came = comes if came is None else came
        if not model.unreliable:
            return received, came
        return self._delivery.deliver(channel, exchange, self._index, received, came, received)

    def _exchange_copies(
        self, channel: str, exchange: int, messages: Tensor, sends: Tensor, comes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send what is new, compressed; return what each arc's owner knows of its peer's message, and whether it moved.

        A notice says what is sent. Without triggers, losses and numbers that travel along, it is known beforehand.
        """
        known, model, dim = self._delivery.known, self._delivery.model, self._network.dim
        rows, header, codec = messages[:, :dim], messages[:, dim:], model.codec
        names = [f"{channel}.{field}" for field in ArcCopies._fields]
        copies = ArcCopies(*(known[name] for name in names)) if names[0] in known else ArcCopies.none(rows)
        new = model.worth_sending(self._index, rows - copies.public)
        payload, mine, copies = copies.send(rows, new, sends, codec)
        self._count_messages(mine.whole, mine.part, dim, messages.element_size())
        theirs, came = copies.expected(comes, codec), comes
        if model.trigger is not None or model.unreliable or header.shape[1]:
            notice = torch.cat([mine.columns(rows.dtype), header], dim=1)
            notice, _ = self._transport.exchange_arcs(notice, sends, comes)
            theirs, header = Notice.read(notice, comes), notice[:, 4:]
        received, _ = self._transport.exchange_arcs(rows, mine.whole, theirs.whole)
        if codec is not None:
            differences, _ = self._transport.exchange_arcs(payload, mine.part, theirs.part)
            at = theirs.part.squeeze(1).nonzero().flatten()
            received = received.index_copy(0, at, codec.unpack(differences[at], dim, rows.dtype))
        if model.unreliable and self._index >= 0:
            everything = torch.cat([received, theirs.columns(rows.dtype), header], dim=1)
            everything, came = self._delivery.deliver(channel, exchange, self._index, everything, comes, everything)
            received, header = everything[:, :dim], everything[:, dim + 4 :]
            theirs = Notice.read(everything[:, dim:], came)
        valid, copies = copies.receive(received, theirs, came, mine)
        known.update(zip(names, copies))
        return torch.cat([copies.heard, header], dim=1), valid

    def average(self, rows: Tensor) -> Tensor:
        model = self._delivery.model
        if model.unreliable or model.shared_copies or self._network.links is not None:
            raise CadenError("This method averages through a server, not on the graph: remove `messages` and `links`.")
        chosen = self._transport.gather(rows)[self._active.to(rows.device)]
        self._count(2 * len(chosen), rows.shape[1], rows.shape[1] * rows.element_size())  # to the server and back
        self._wait_for_all(rows.shape[1] * rows.element_size(), hops=2)
        return chosen.mean(0)

    def maximum(self, values: Tensor) -> Tensor:
        if self._index >= 0:  # flooding takes as many scalar exchanges as the diameter
            graph = self._network.graph
            self._count(2 * len(graph.edges) * graph.diameter, 0, values.element_size())  # scalars count as bytes only
            self._wait_for_all(values.element_size(), graph.diameter)
        return self._transport.largest(values)

    def _wait_for_all(self, size: int, hops: int) -> None:
        if self._network.timer is not None and self._index >= 0:
            self._network.timer.barrier(self._index, size, hops)

    def uniform(self, label: str) -> float:
        return float(self._network.draw.uniform(f"common/{label}", self._index, count=1)[0])
