"""The times of a simulated run: each agent's own clock, who waited for whom, and what a deadline does.

Gradients are charged when they are counted, messages by their counted size. An arc is a direction of an edge, numbered
as in `core.Edges`: its owner sends, its peer receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from caden.draws import Draw
from caden.errors import CadenError
from caden.graphs import Graph
from caden.networks.clock import Clock, Values


class Turn(NamedTuple):
    """Who makes a step next, and which of its steps it is."""

    index: int  # type: ignore[assignment]
    active: Tensor  # (m,) bool


class Times(NamedTuple):
    """What came of the times: shares of the total that each agent computed, its steps, and who waited for whom."""

    busy: np.ndarray  # (m,)
    steps: np.ndarray  # (m,)
    owner: np.ndarray  # (2E,) of each arc
    peer: np.ndarray  # (2E,)
    waited: np.ndarray  # (2E,) seconds that the peer waited for the owner
    participation: np.ndarray | None = None  # (m,) share of the rounds that each agent took part in, by deadlines


class Timer:
    """The times of a run in "wait" mode, and what the other modes share."""

    may_sleep = False

    def __init__(self, clock: Clock, graph: Graph, draw: Draw):
        m, edges = graph.agents, len(graph.edges)
        self.clock, self.agents = clock, m
        self.compute = Values("compute", clock.compute, m, draw, "agent")
        self._overhead, self._serve = (Values(n, getattr(clock, n), m, draw, "agent") for n in ("overhead", "serve"))
        self._latency = Values("latency", clock.latency, edges, draw, "edge")
        self._bandwidth = Values("bandwidth", clock.bandwidth, edges, draw, "edge")
        self._up, self._down = (Values(n, getattr(clock, n), m, draw, "agent") for n in ("up", "down"))
        first, second = graph.edges.T
        self.owner, self.peer = np.concatenate([first, second]), np.concatenate([second, first])  # of each arc
        # Set by the run: (m,) gradients so far, and local steps in a round.
        self.gradients: Callable[[], np.ndarray] = lambda: np.zeros(m, np.int64)
        self.planned: Callable[[int], np.ndarray] = lambda index: np.ones(m)
        self.adaptive = False  # the planned steps are an upper bound
        self._awake = np.ones(m, bool)
        self._serving = np.zeros(m)  # seconds that the next exchange leaves for work on messages
        zero = np.zeros(m)
        # Seconds: where each agent's own time stands, its computing time, and how long arcs were waited for.
        self._state = {"now": zero.copy(), "busy": zero.copy(), "waited": np.zeros(len(self.owner))}
        self._state |= {"charged": np.zeros(m, np.int64), "steps": np.zeros(m, np.int64)}
        # Gradients per planned step in each agent's last round; negative: unknown.
        self._state["rate"] = np.full(m, -1.0)
        # When an agent's own connection, and each arc, is free again.
        self._state |= {"up": zero.copy(), "down": zero.copy(), "line": np.zeros(len(self.owner))}

    @property
    def time(self) -> float:
        """Simulated seconds since the start, until the last agent has done what was counted."""
        return float(self._state["now"].max())

    def columns(self) -> dict[str, float]:
        """Return the columns of a history."""
        time = self.time
        idle = 1 - self._computed() / time if time > 0 else np.zeros(self.agents)
        return {"time": time, "idle": float(idle.mean()), "idle_most": float(idle.max())}

    def times(self) -> Times:
        """Return what came of the times so far."""
        state = self._state
        busy = self._computed() / max(self.time, 1e-300)
        return Times(busy, state["steps"], self.owner, self.peer, state["waited"])

    def _computed(self) -> np.ndarray:
        """Return (m,) seconds that each agent has computed."""
        return self._state["busy"]

    def begin(self) -> None:
        """Charge what agents did before their first step."""
        self.charge(0)

    def overhead(self, index: int) -> np.ndarray:
        """Return (m,) seconds of a step besides its gradients, if nobody waits."""
        return np.asarray(self._overhead(index) + self._serve(index))

    def charge(self, index: int) -> np.ndarray:
        """Add the computing time of the gradients since the last call; return (m,) how many they were."""
        total = self.gradients()
        new = total - self._state["charged"]
        self._state["charged"] = total.copy()
        self._work(self.compute(index) * new)
        return np.asarray(new)

    def expected(self, index: int) -> np.ndarray:
        """Return (m,) how many gradients a step will probably take."""
        planned, rate = np.maximum(self.planned(index), 1), self._state["rate"]
        return np.asarray(np.where(rate >= 0, rate * planned, 1 if self.adaptive else planned))

    def learn(self, index: int, active: np.ndarray, made: np.ndarray) -> None:
        """Note how many gradients the steps of active agents took."""
        rate = made / np.maximum(self.planned(index), 1)
        self._state["rate"] = np.where(active, rate, self._state["rate"])

    def _work(self, seconds: np.ndarray) -> None:
        """Let agents compute for (m,) seconds."""
        self._state["busy"] += seconds
        self._state["now"] += seconds

    def _latencies(self, index: int) -> np.ndarray:
        return np.concatenate([self._latency(index)] * 2)

    def travel(self, index: int, sizes: np.ndarray, begin: np.ndarray) -> np.ndarray:
        """Return (2E,) when messages of some bytes arrive that arcs send at `begin` (2E,); 0 bytes: never sent."""
        sent, arrival = self._cross(index, sizes, begin)
        return self._queue("down", self.peer, sent, arrival, sizes, self._down(index))

    def _cross(self, index: int, sizes: np.ndarray, begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which arcs send, and (2E,) when their messages come to the receivers' own connections."""
        sent = np.flatnonzero(sizes > 0)
        leave = self._queue("up", self.owner, sent, begin, sizes, self._up(index))[sent]
        bandwidth = np.concatenate([self._bandwidth(index)] * 2)[sent]
        if np.isfinite(bandwidth).any():  # one after the other
            leave = np.maximum(leave, self._state["line"][sent]) + sizes[sent] / bandwidth
            self._state["line"][sent] = leave
        arrival = np.full(len(sizes), -np.inf)
        arrival[sent] = leave + self._latencies(index)[sent]
        return sent, arrival

    def _queue(
        self, name: str, agent: np.ndarray, sent: np.ndarray, begin: np.ndarray, sizes: np.ndarray, rate: np.ndarray
    ) -> np.ndarray:
        """Return when messages have passed an agent's own connection, one after the other."""
        if not np.isfinite(rate).any():
            return begin
        end, free = begin.copy(), self._state[name]
        for arc in sent[np.argsort(begin[sent], kind="stable")]:
            i = agent[arc]
            end[arc] = free[i] = max(free[i], begin[arc]) + sizes[arc] / rate[i]
        return end

    def exchange(self, index: int, sizes: np.ndarray) -> None:
        """Let messages of (2E,) bytes travel along the arcs, and everybody wait for theirs."""
        self.charge(index)
        now = self._state["now"]
        begin = now[self.owner]
        if self.clock.pull:  # who waits asks when it is told that there is something
            latency = self._latencies(index)
            begin = np.maximum(begin + latency, now[self.peer]) + latency
        arrival = self.travel(index, sizes, begin)
        self._work(self._serving)
        self._serving = np.zeros(self.agents)
        latest = now.copy()
        np.maximum.at(latest, self.peer, arrival)
        waits = (latest > now) & self._awake  # messages reach sleepers, too, but nobody waits for them there
        last = np.flatnonzero((arrival == latest[self.peer]) & waits[self.peer])
        _, first = np.unique(self.peer[last], return_index=True)  # of several that came last
        self._state["waited"][last[first]] += (latest - now)[self.peer[last[first]]]
        self._state["now"] = latest

    def barrier(self, index: int, size: float, hops: int) -> None:
        """Let everybody wait for everybody: messages of some bytes that travel some links, one after the other."""
        self.charge(index)
        self._state["now"][:] = self._state["now"].max() + hops * self._hop(index, size)

    def _hop(self, index: int, size: float) -> float:
        """Return how long a message takes over the slowest link."""
        trips = 3 if self.clock.pull else 1
        slowest = min(float(rate(index).min()) for rate in (self._bandwidth, self._up, self._down))
        return trips * float(self._latency(index).max()) + size / slowest

    def turn(self, index: int, active: Tensor) -> Turn:
        """Return who takes part in the next step, given the schedule's (m,) `active`."""
        self._awake = active.numpy()
        self._work(self._overhead(index) * self._awake)
        self._serving = self._serve(index) * self._awake
        return Turn(index, active)

    def end_turn(self, turn: Turn) -> int:
        """Note that the step is done, and return how many rounds are."""
        self.charge(turn.index)
        self._work(self._serving)  # nothing was exchanged
        self._serving = np.zeros(self.agents)
        self._state["steps"] += turn.active.numpy()
        return turn.index + 1

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold."""
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in self._state.items()}

    def restore(self, buffers: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `buffers` returned."""
        self._state = {name: buffers[name].numpy().copy() for name in self._state}


class DeadlineTimer(Timer):
    """Rounds of limited length: who is not ready at the end of one counts as asleep in it.

    A step is made in the round in which the agent is ready, and only then its gradients and messages are known. Until
    then it is taken to be as long as the agent's last one. If that puts it into another round than it belongs to, the
    next step is longer or shorter by the rounds in between.
    """

    may_sleep = True

    def __init__(self, clock: Clock, graph: Graph, draw: Draw):
        super().__init__(clock, graph, draw)
        m = self.agents
        # Seconds of work left (negative: none); seconds of messages of each agent's last step, and how long that was
        # taken to be (0: unknown); seconds by which the next one is longer; seconds per gradient now.
        self._state |= {"left": np.full(m, -1.0), "way": np.zeros(m), "took": np.zeros(m)}
        self._state |= {"owed": np.zeros(m), "pace": np.zeros(m)}
        self._state["round"] = np.zeros(2)  # length of this round, and how many there were
        self._limit, self._all_ready = 0.0, False  # of this round
        self._sent = np.zeros(m)  # seconds of messages in this round

    def columns(self) -> dict[str, float]:
        share = self._participation()
        return super().columns() | {"participation": float(share.mean()), "participation_least": float(share.min())}

    def times(self) -> Times:
        return super().times()._replace(participation=self._participation())

    def _participation(self) -> np.ndarray:
        """Return (m,) shares of the rounds."""
        return np.asarray(self._state["steps"] / max(self._state["round"][1], 1))

    def _computed(self) -> np.ndarray:
        state = self._state  # what steps took longer than they were taken to is still to come
        under_way = np.where(state["left"] >= 0, np.maximum(state["left"] - state["took"], 0.0), 0.0)
        return np.asarray(np.maximum(state["busy"] - np.maximum(state["owed"], 0.0) - under_way, 0.0))

    def begin(self) -> None:
        super().begin()
        self._state["owed"] = self._state["busy"].copy()  # who takes long to begin is late in the first rounds

    def _work(self, seconds: np.ndarray) -> None:
        """Rounds pass by themselves."""
        self._state["busy"] += seconds

    def exchange(self, index: int, sizes: np.ndarray) -> None:
        """Add up how long each agent's messages take, as if nothing else were on the way."""
        state = self._state
        queues = {name: state[name] for name in ("up", "down", "line")}
        state |= {name: np.zeros_like(queue) for name, queue in queues.items()}
        begin = 2 * self._latencies(index) if self.clock.pull else np.zeros(len(sizes))
        way = np.zeros(self.agents)
        np.maximum.at(way, self.owner, self.travel(index, sizes, begin))
        state |= queues
        self._sent += way

    def barrier(self, index: int, size: float, hops: int) -> None:
        self._sent += hops * self._hop(index, size)

    def turn(self, index: int, active: Tensor) -> Turn:
        state = self._state
        begins = (state["left"] < 0) & active.numpy()
        state["pace"] = np.where(begins | (state["took"] == 0), self.compute(index), state["pace"])
        seconds = state["pace"] * self.expected(index) + self.overhead(index) + state["way"]
        total = np.maximum(seconds + state["owed"], 0.0)
        state["left"][begins] = total[begins]
        known = np.where(state["took"] > 0, state["took"], total)
        state["owed"][begins] = np.minimum(seconds + state["owed"], 0.0)[begins]  # what is left of a credit
        state["took"] = np.where(begins, seconds, state["took"])
        working, spec = state["left"] >= 0, self.clock.deadline
        limit = float(np.quantile(known, spec["quantile"])) if isinstance(spec, Mapping) else float(spec or 0)
        ready = working & (state["left"] <= limit * (1 + 1e-12))
        if limit <= 0 and (working & ~ready).any():
            raise CadenError("`clock.deadline` gives rounds that take no time: raise the quantile, or set seconds.")
        self._limit, self._all_ready = limit, bool(working.any() and ready[working].all())
        self._sent = np.zeros(self.agents)
        return Turn(index, torch.from_numpy(ready))

    def end_turn(self, turn: Turn) -> int:
        state, ready, index = self._state, turn.active.numpy(), turn.index
        made = self.gradients() - state["charged"]
        state["charged"] = self.gradients()
        overhead = self.overhead(index)
        self._work(np.where(ready, state["pace"] * made + overhead, 0.0))
        seconds = state["pace"] * made + overhead + self._sent
        left = np.where(ready, state["left"] + seconds - state["took"], 0.0)  # as it turned out
        length = min(max(float(left.max()), 0.0), self._limit) if self._all_ready else self._limit
        late = np.maximum(left - length, 0.0) + np.minimum(left, 0.0)
        if length > 0:  # in rounds
            late = np.sign(late) * np.ceil(np.abs(late) / length * (1 - 1e-12)) * length
        state["owed"] += np.where(ready, late, 0.0)
        self.learn(index, ready, made)
        state["way"] = np.where(ready, self._sent, state["way"])
        state["now"] += length
        state["round"] = np.array([length, state["round"][1] + 1])
        state["left"] = np.where(ready, -1.0, np.where(state["left"] >= 0, state["left"] - length, -1.0))
        return super().end_turn(turn)
