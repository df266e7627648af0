"""Agents that run free: steps at each agent's own pace, and messages that are there when they have arrived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from caden.draws import Draw
from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.clock import Clock
from caden.networks.codec import Codec
from caden.networks.layout import Layout
from caden.networks.timers import Timer, Turn
from caden.networks.transport import Memory

_TOGETHER = 1e-12  # times that differ by this share are one: sums of equal times differ in their last bits


class _Letters(NamedTuple):
    """Messages under way."""

    arcs: np.ndarray  # (n,)
    numbers: np.ndarray  # (n,) of the step that each was sent in
    arrivals: np.ndarray  # (n,)
    sizes: np.ndarray  # (n,) bytes that have not passed the receiver's own connection yet
    rows: Tensor  # (n, d)

    def select(self, mask: np.ndarray) -> _Letters:
        if mask.all():
            return self
        arcs, numbers, arrivals, sizes = (part[mask] for part in (self.arcs, self.numbers, self.arrivals, self.sizes))
        return _Letters(arcs, numbers, arrivals, sizes, self.rows[torch.from_numpy(mask)])


class FreeTimer(Timer):
    """The times of a run in "free" mode.

    The length of a step is known when its gradients are counted, which is at its end. So a step is taken to end when
    the agent's last number of gradients would be done; the next one makes up for the difference.
    """

    may_sleep = True

    def __init__(self, clock: Clock, graph: Graph, draw: Draw):
        super().__init__(clock, graph, draw)
        if (self.compute(0) + self.overhead(0) <= 0).any():
            raise CadenError('`clock.compute` must be positive in the mode "free": steps would take no time.')
        self._state["ends"] = np.full(self.agents, -1.0)
        # Of each arc: the newest message that its peer has taken, and when, and, if messages are pulled, the newest one
        # sent and offered, when that was, and when a request for it comes in (infinite: none does).
        arcs = len(self.owner)
        self._state |= {name: np.full(arcs, -1) for name in ("taken", "sent", "offered")}
        self._state |= {"request": np.full(arcs, np.inf), "taken_at": np.zeros(arcs), "offered_at": np.zeros(arcs)}
        # With compression, both ends of an arc keep a copy of what was sent. Whether anything was, and when the last
        # message arrives: differences must be added in order.
        self._state |= {"told": np.zeros(arcs, bool), "last": np.zeros(arcs)}
        self._copies: Tensor | None = None  # (2E, d)
        self.codec: Codec | None = None
        self.dim = 0  # numbers of a row that are compressed
        self.posted = 0, 0  # messages and bytes that left in the last delivery
        self._offers: Tensor | None = None  # (2E, n)
        self._letters: list[_Letters] = []
        self._turn, self._charged = Turn(0, torch.ones(self.agents, dtype=torch.bool)), False  # all begin

    def barrier(self, index: int, size: float, hops: int) -> None:
        raise refusal()

    def exchange(self, index: int, sizes: np.ndarray) -> None:
        """Nobody waits; see `deliver`."""

    def turn(self, index: int, active: Tensor) -> Turn:
        state = self._state
        if (state["ends"] < 0).any():  # the first steps
            state["ends"] = self._end(state["now"], 0)
        first = state["ends"] <= state["ends"].min() * (1 + _TOGETHER)
        count = int(state["steps"][first].min())
        self._turn, self._charged = Turn(count, torch.from_numpy(first & (state["steps"] == count))), False
        return self._turn

    def _end(self, begin: np.ndarray, index: int) -> np.ndarray:
        """Return (m,) when steps end that begin at some times."""
        seconds = self.overhead(index) + self.compute(index) * self.expected(index)
        if (seconds <= 0).any():
            raise CadenError('Steps that take no time have no order in the mode "free": `local_steps` must not be 0.')
        end = begin + seconds
        tick = self.clock.tick
        return np.asarray(np.ceil(end / tick * (1 - _TOGETHER)) * tick if tick else end)

    def deliver(self, arcs: Tensor, sends: Tensor) -> tuple[Tensor, Tensor]:
        """Send the messages of the agents that step now; return the newest ones that have come, and where."""
        index, state, active = self._turn.index, self._state, self._turn.active.numpy()
        moment = float(state["ends"][active].max())
        done, self.posted = self._charge_step(moment), (0, 0)
        sending = sends.squeeze(1).cpu().numpy() & active[self.owner]
        begin = done[self.owner]
        if self.clock.pull:
            self._answer(index, np.where(sending, begin, moment))
            self._offer(index, arcs, sending, begin)
        else:
            self._post(index, sending, np.full(len(begin), index), begin, arcs)
        return self._delivered(arcs, active, moment)

    def _charge_step(self, moment: float) -> np.ndarray:
        """Charge the step of the agents that step now, and return (m,) when it is done; it was taken to end now."""
        index, state, active = self._turn.index, self._state, self._turn.active.numpy()
        made = self.charge(index)
        uncounted = active & (made == 0)  # a solver without gradients takes as long as its steps
        made = np.where(uncounted, self.planned(index), made)
        self._work(np.where(uncounted, self.compute(index) * made, 0) + self.overhead(index))
        done = np.maximum(moment, state["now"])
        if self.clock.tick:
            state["now"] = np.where(active, done, state["now"])
        self.learn(index, active, made)
        self._charged = True
        return np.asarray(done)

    def _work(self, seconds: np.ndarray) -> None:
        super()._work(np.where(self._turn.active.numpy(), seconds, 0))

    def _post(self, index: int, going: np.ndarray, numbers: np.ndarray, begin: np.ndarray, rows: Tensor) -> None:
        """Send the rows of some arcs."""
        at = np.flatnonzero(going)
        letters, sizes = self._written(at, rows[torch.from_numpy(at)])
        every = np.zeros(len(going))
        every[at] = sizes
        arrival = self._cross(index, every, begin)[1][at]
        if self.codec is not None:
            self._state["last"][at] = arrival = np.maximum(arrival, self._state["last"][at])
        self.posted = len(at), int(sizes.sum())
        if len(at):
            self._letters.append(_Letters(at, numbers[at], arrival, sizes.astype(float), letters))

    def _written(self, at: np.ndarray, rows: Tensor) -> tuple[Tensor, np.ndarray]:
        """Return the rows of arcs as their peers will know them, and the bytes that each takes.

        The first one is sent whole; later ones as compressed differences to the copy.
        """
        whole = np.full(len(at), rows.shape[1] * rows.element_size())
        if self.codec is None:
            return rows, whole
        if self._copies is None:
            self._copies = rows.new_zeros(len(self.owner), self.dim)
        dim, arcs, told = self.dim, torch.from_numpy(at), self._state["told"][at]
        copies = self._copies[arcs]
        change = self.codec.unpack(self.codec.pack(rows[:, :dim] - copies), dim, rows.dtype)
        copies = torch.where(torch.from_numpy(told).unsqueeze(1), copies + change, rows[:, :dim])
        self._copies[arcs], self._state["told"][at] = copies, True
        header, itemsize = rows[:, dim:], rows.element_size()
        short = self.codec.size(dim, itemsize) + header.shape[1] * itemsize
        return torch.cat([copies, header], dim=1), np.where(told, short, whole)

    def _offer(self, index: int, arcs: Tensor, sending: np.ndarray, begin: np.ndarray) -> None:
        """Announce rows."""
        state = self._state
        if self._offers is None:
            self._offers = arcs.clone()
        self._offers[torch.from_numpy(sending)] = arcs[torch.from_numpy(sending)]
        first = sending & (state["offered"] == state["sent"])  # later ones are news to nobody
        state["offered_at"] = np.where(first, begin, state["offered_at"])
        state["offered"] = np.where(sending, index, state["offered"])
        self._ask(index)

    def _ask(self, index: int) -> None:
        """Agents that have used what they fetched ask for the next message as soon as they hear of one."""
        state, latency = self._state, self._latencies(index)
        asks = np.isinf(state["request"]) & (state["sent"] == state["taken"]) & (state["offered"] > state["sent"])
        asked = np.maximum(state["offered_at"] + latency, state["taken_at"]) + latency
        state["request"] = np.where(asks, asked, state["request"])

    def _answer(self, index: int, until: np.ndarray) -> None:
        """Send the newest rows to those whose requests have come in by then (2E,), before newer ones are offered."""
        state, asked = self._state, self._state["request"] <= until * (1 + _TOGETHER)
        if self._offers is None or not asked.any():
            return
        self._post(index, asked, state["offered"], state["request"], self._offers)
        state["sent"] = np.where(asked, state["offered"], state["sent"])
        state["request"] = np.where(asked, np.inf, state["request"])

    def _receive(self, active: np.ndarray, moment: float) -> None:
        """Let what has come to the connections of the agents that step now pass them, in the order in which it came."""
        rate, free = self._down(self._turn.index), self._state["down"]
        if not np.isfinite(rate).any():
            return
        coming = []
        for batch, letters in enumerate(self._letters):
            here = (
                (letters.sizes > 0) & active[self.peer[letters.arcs]] & (letters.arrivals <= moment * (1 + _TOGETHER))
            )
            coming += [(letters.arrivals[n], batch, n) for n in np.flatnonzero(here)]
        for arrival, batch, n in sorted(coming):
            letters = self._letters[batch]
            i = self.peer[letters.arcs[n]]
            letters.arrivals[n] = free[i] = max(free[i], arrival) + letters.sizes[n] / rate[i]
            letters.sizes[n] = 0

    def _delivered(self, arcs: Tensor, active: np.ndarray, moment: float) -> tuple[Tensor, Tensor]:
        """Return the newest messages that have arrived at the agents that step now."""
        half, taken = len(self.owner) // 2, self._state["taken"]
        received, came = torch.zeros_like(arcs), torch.zeros(len(arcs), 1, dtype=torch.bool, device=arcs.device)
        waiting = []
        self._receive(active, moment)
        while self._letters:  # in the order in which they were sent
            letters = self._letters.pop(0)
            here = active[self.peer[letters.arcs]] & (letters.arrivals <= moment * (1 + _TOGETHER))
            if not here.all():
                waiting.append(letters.select(~here))
            newer = letters.select(here & (letters.numbers > taken[letters.arcs]))
            at = torch.from_numpy((newer.arcs + half) % (2 * half))  # the arcs of the receivers
            received[at], came[at] = newer.rows, True
            taken[newer.arcs], self._state["taken_at"][newer.arcs] = newer.numbers, moment
        self._letters = waiting
        if self.clock.pull:
            self._ask(self._turn.index)
        return received, came

    def end_turn(self, turn: Turn) -> int:
        state, active = self._state, turn.active.numpy()
        if not self._charged:  # nothing was sent
            self._charge_step(float(state["ends"][active].max()))
        state["steps"] += active
        next_end = np.maximum(self._end(state["now"], turn.index + 1), state["ends"])
        state["ends"] = np.where(active, next_end, state["ends"])
        return int(state["steps"].min())

    def buffers(self) -> dict[str, Tensor]:
        known = super().buffers()
        if self._letters:
            arcs, numbers, arrivals, sizes, rows = zip(*self._letters)
            known |= {"mail": torch.from_numpy(np.stack([np.concatenate(arcs), np.concatenate(numbers)]))}
            known |= {"arrivals": torch.from_numpy(np.concatenate(arrivals)), "rows": torch.cat(rows)}
            known |= {"sizes": torch.from_numpy(np.concatenate(sizes))}
            known["batches"] = torch.tensor([len(batch) for batch in arcs])
        kept = {"offers": self._offers, "copies": self._copies}
        return known | {name: rows for name, rows in kept.items() if rows is not None}

    def restore(self, buffers: Mapping[str, Tensor]) -> None:
        super().restore(buffers)
        if "rows" in buffers:
            counts = buffers["batches"].tolist()
            numbers = *buffers["mail"], buffers["arrivals"].clone(), buffers["sizes"].clone()
            arcs, sent, arrivals, sizes = ([p.numpy() for p in torch.split(part, counts)] for part in numbers)
            self._letters = list(map(_Letters, arcs, sent, arrivals, sizes, torch.split(buffers["rows"], counts)))
        self._offers, self._copies = buffers.get("offers"), buffers.get("copies")


def refusal() -> CadenError:
    """Return why a method cannot run free."""
    return CadenError(
        'The mode "free" needs a method whose rounds are a single exchange over arcs, such as caden, radmm or lt_admm.'
    )


class Mail(Memory):
    """The transport of all agents of this process, by a clock."""

    late = True
    packs = True

    def __init__(self, timer: FreeTimer, codec: Codec | None):
        self._timer, self._index, self._exchanges = timer, -1, 0
        timer.codec = codec

    def connect(self, layout: Layout, dim: int) -> None:
        super().connect(layout, dim)
        self._timer.dim = dim

    def begin_round(self, index: int) -> None:
        self._index, self._exchanges = index, 0

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        if self._index >= 0:
            raise refusal()
        return rows

    def exchange_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> tuple[Tensor, Tensor | None]:
        self._exchanges += 1
        if self._exchanges > 1:
            raise refusal()
        received = self._timer.deliver(arcs, sends)
        self.posted = self._timer.posted
        return received
