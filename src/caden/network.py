"""`Stacked`: all agents in one process, and the operators of a round as sums over the edge list.

Communications are counted here, not by the methods: one d-vector over one directed edge is 1, only awake agents send,
and the initial exchange is free (the paper does not count it either). Nothing is ever of size m x m.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from caden.core import Edges, Heard, Problem, Round
from caden.errors import CadenError
from caden.graphs import Graph
from caden.messages import Loss, LossyHeard
from caden.schedules import Draw

_SLICE = 1 << 24  # elements of an edge temporary; wider rows are handled in slices of columns


class StackedHeard(NamedTuple):
    """`core.Heard` for rows that all lie in memory."""

    rows: Tensor  # (m, d) what each agent handed in
    sent: Tensor | None  # (m, d) what each agent last sent; None if somebody asleep never sent anything
    edges: Edges

    def _last(self) -> Tensor:
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
        return out

    def laplacian(self) -> Tensor:
        return self._edge_sum(self._last())

    def mix(self, weights: Tensor | None = None) -> Tensor:
        """W v with w_ij on edges whose ends are both awake, the rest of each row's weight on itself.

        `weights` (e,) defaults to Metropolis weights of the awake subgraph, 1 / (1 + max of the awake degrees).
        """
        return self.rows - self._edge_sum(self.rows, self.edges.mixing(self.rows, weights))

    def ends(self) -> tuple[Tensor, Tensor]:
        rows = self._last()
        return rows[self.edges.first], rows[self.edges.second]


class Stacked:
    """The network of a simulation: hands out rounds, keeps sleepers' last rows, counts what is sent."""

    def __init__(self, graph: Graph, problem: Problem, draw: Draw, may_sleep: bool, loss: Loss | None = None):
        if graph.agents != problem.agents:
            raise CadenError(f"The graph has {graph.agents} agents but the problem has {problem.agents}.")
        if graph.agents < 2:
            raise CadenError("A network needs at least 2 agents.")
        device = problem.device
        self.first = torch.from_numpy(graph.edges[:, 0].copy()).to(device)
        self.second = torch.from_numpy(graph.edges[:, 1].copy()).to(device)
        self._graph, self._draw, self._loss = graph, draw, loss
        self._degree = torch.from_numpy(graph.degrees.copy()).to(device, problem.dtype).unsqueeze(1)
        self.may_sleep = may_sleep
        self.last: dict[str, Tensor] = {}  # the sleepers' last broadcasts, by position in the round
        self.numbers_sent = 0
        self.bytes = 0
        self._dim = problem.dim

    @property
    def communications(self) -> float:
        """d-vectors sent over directed edges so far; a fraction only if scalars were sent too."""
        whole, rest = divmod(self.numbers_sent, self._dim)
        return whole if rest == 0 else self.numbers_sent / self._dim

    def round(
        self, index: int, active: Tensor, work: Tensor, problem: Problem, curvature: Tensor | None = None
    ) -> Round:
        """The context of one round; `active` (m,) bool, `work` (m,)."""
        awake = active.to(problem.device).unsqueeze(1)  # (m, 1)
        edges = Edges(self.first, self.second, awake[self.first], awake[self.second], self._graph.agents)
        everyone = bool(active.all())
        sending = int(self._graph.degrees[active.numpy()].sum())  # directed edges whose tail is awake
        broadcasts = 0

        def count(directed_edges: int, numbers: int, itemsize: int) -> None:
            if index >= 0:
                self.numbers_sent += directed_edges * numbers
                self.bytes += directed_edges * numbers * itemsize

        def arrivals(number: int) -> Tensor:
            """(2e, 1) bool at each arc's owner: the peer was awake and its message got through."""
            arrived = torch.cat([edges.awake_second, edges.awake_first])
            if self._loss is not None and index >= 0:
                through = self._loss.arrives(self._draw, index, number, len(arrived))
                arrived = arrived & through.to(arrived.device)
            return arrived

        def broadcast(rows: Tensor) -> Heard:
            nonlocal broadcasts
            number, channel, broadcasts = broadcasts, f"broadcast{broadcasts}", broadcasts + 1
            count(sending, rows.shape[1], rows.element_size())
            if self._loss is not None:
                peers, arrived = rows[torch.cat([self.second, self.first])], arrivals(number)
                own = rows[edges.owner()]  # of a peer that was never heard an agent knows nothing but itself
                self.last[channel] = torch.where(arrived, peers, self.last.get(channel, own))
                if index < 0:
                    return StackedHeard(rows, rows, edges)
                awake_owner = torch.cat([edges.awake_first, edges.awake_second])
                return LossyHeard(rows, self.last[channel], arrived & awake_owner, edges)
            if not self.may_sleep:
                return StackedHeard(rows, rows, edges)
            if everyone:
                self.last[channel] = rows.clone()
            elif channel in self.last:
                self.last[channel] = torch.where(awake, rows, self.last[channel])
            return StackedHeard(rows, self.last.get(channel), edges)

        def exchange(messages: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal broadcasts
            number, broadcasts = broadcasts, broadcasts + 1
            half = len(self.first)  # arc e is owned by first[e], arc e + half by second[e]: the reverse of the other
            count(sending, messages.shape[1], messages.element_size())
            return torch.cat([messages[half:], messages[:half]]), arrivals(number)

        def average(rows: Tensor) -> Tensor:
            chosen = rows[active.to(rows.device)]
            count(2 * len(chosen), rows.shape[1], rows.element_size())  # up to the server and down again
            return chosen.mean(0)

        def maximum(values: Tensor) -> Tensor:
            # Flooding: as many scalar exchanges as the longest path has edges.
            if index >= 0:
                count(2 * len(self.first) * self._graph.diameter, 1, values.element_size())
            return values.max()

        def uniform(label: str) -> float:
            return float(self._draw.uniform(f"common/{label}", index, count=1)[0])

        return Round(
            index=index,
            active=awake,
            awake=int(active.sum()),
            work=(work * active).to(problem.device),
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
        return dict(self.last)

    def restore(self, buffers: dict[str, Tensor], numbers_sent: int, sent_bytes: int) -> None:
        """Take back what `buffers` gave."""
        self.last = {name: rows.to(self.first.device) for name, rows in buffers.items()}
        self.numbers_sent, self.bytes = numbers_sent, sent_bytes
