"""A clock for the simulator: how long agents compute, how long messages travel, and who waits for whom.

Three modes.

    wait      An agent continues when the messages of its neighbours are there, as peers in lockstep do. So a round
              takes as long as the slowest agent near by.
    deadline  A round ends after some seconds. Whoever is not ready then counts as asleep in it, and takes part in the
              first round in which it is ready, with the anchors of that round.
    free      No rounds: an agent makes its next step when it has finished the last one, with the newest messages that
              have arrived. What arrives during a step is used after it.

Times are numbers, so nothing here depends on the speed of this machine. Gradients are charged when they are counted,
messages by their counted size. Draws are pure functions of (seed, label, round).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from caden.draws import Draw
from caden.errors import CadenError, require_choice, require_number, require_positive
from caden.graphs import Graph
from caden.networks.transport import Memory

MODES = ("wait", "deadline", "free")
Value = float | Sequence[float] | Mapping[str, Any] | None
# Distributions with mean 1, by their parameter.
_SHAPES: dict[str, Callable[[float, np.ndarray], np.ndarray]] = {
    "exponential": lambda spread, u: stats.expon.ppf(u),
    "lognormal": lambda spread, u: stats.lognorm.ppf(u, spread, scale=np.exp(-(spread**2) / 2)),
    "uniform": lambda spread, u: 1 + spread * (2 * u - 1),
}


@dataclass(frozen=True)
class Clock:
    """How long everything takes in a simulated network, in seconds and bytes per second.

    Every value is a number, one per agent (or per edge), a table {"name": "lognormal", "mean": 0.2, "spread": 0.5}, or
    {"file": "trace.csv"} with a line per round, repeated, and a column per agent or edge. Distributions are
    "exponential", "lognormal" (spread: deviation of the logarithm) and "uniform" (spread: largest relative deviation);
    with `"per": "agent"` (or "edge") a value is drawn once, with `"per": "round"`, the default, in every round.

    compute: seconds per gradient.
    latency, bandwidth: of each edge in each direction; bandwidth None is unlimited.
    up, down: bandwidth of an agent's own connection, which its messages share.
    mode: "wait", "deadline" or "free".
    deadline: length of a round in "deadline" mode: seconds, or {"quantile": 0.8} of the agents' last times.
    """

    compute: Value = 0.1
    latency: Value = 0.0
    bandwidth: Value = None
    up: Value = None
    down: Value = None
    mode: str = "wait"
    deadline: float | Mapping[str, float] | None = None

    @classmethod
    def from_spec(cls, spec: Clock | Mapping[str, Any] | None) -> Clock | None:
        """Return the checked clock that `spec` describes; None if there is none."""
        if not spec:
            return None
        if isinstance(spec, Mapping):
            names = [field.name for field in fields(cls)]
            for key in spec:
                require_choice("key", f"clock.{key}", [f"clock.{name}" for name in names])
            spec = cls(**spec)
        require_choice("clock.mode", spec.mode, MODES)
        if (spec.deadline is None) == (spec.mode == "deadline"):
            raise CadenError('`clock.deadline` must be set exactly in the mode "deadline".')
        if isinstance(spec.deadline, Mapping):
            quantile = spec.deadline.get("quantile")
            if set(spec.deadline) != {"quantile"} or not 0 < require_number("clock.deadline.quantile", quantile) <= 1:
                raise CadenError(f"`clock.deadline` must be seconds or a quantile in (0, 1], got {spec.deadline!r}.")
        elif spec.deadline is not None:
            require_positive("clock.deadline", spec.deadline)
        return spec


class _Values:
    """The values of one field: (n,) numbers for each round."""

    def __init__(self, name: str, spec: Value, count: int, draw: Draw, unit: str):
        self._name, self._count, self._draw, self._rows = name, count, draw, np.empty((0, 0))
        self._table = spec if isinstance(spec, Mapping) else {}
        if "file" in self._table:
            self._rows = _trace(name, Path(str(self._table["file"])), count)
        elif self._table:
            self._check(unit)
        elif spec is None:
            self._rows = np.full((1, count), np.inf)
        else:
            array = np.asarray(spec, dtype=float)
            if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
                raise CadenError(f"`clock.{name}` must be a number or one per {unit} ({count}), got {array.shape[0]}.")
            self._rows = np.broadcast_to(array, (1, count))
        low = 0 if name in ("latency", "compute") else np.finfo(float).tiny
        if len(self._rows) and not (self._rows >= low).all():
            raise CadenError(f"`clock.{name}` must be {'at least 0' if low == 0 else 'positive'}, got {spec!r}.")

    def _check(self, unit: str) -> None:
        known = ["name", "mean", "spread", "per"]
        for key in self._table:
            require_choice("key", f"clock.{self._name}.{key}", [f"clock.{self._name}.{k}" for k in known])
        require_choice(f"distribution of `clock.{self._name}`", self._table.get("name"), _SHAPES)
        require_positive(f"clock.{self._name}.mean", self._table.get("mean"))
        require_choice(f"clock.{self._name}.per", self._table.get("per", "round"), ("round", unit))
        self._spread = require_number(f"clock.{self._name}.spread", self._table.get("spread", 0.5))
        if self._spread <= 0 or (self._table["name"] == "uniform" and self._spread > 1):
            raise CadenError(f"`clock.{self._name}.spread` must be positive (uniform: at most 1), got {self._spread}.")

    def __call__(self, round: int) -> np.ndarray:
        if len(self._rows):
            return np.asarray(self._rows[max(round, 0) % len(self._rows)])
        index = round if self._table.get("per", "round") == "round" else -1
        u = self._draw.uniform(f"clock/{self._name}", index, self._count)
        return np.asarray(float(self._table["mean"]) * _SHAPES[self._table["name"]](self._spread, u))


def _trace(name: str, path: Path, count: int) -> np.ndarray:
    try:
        rows = np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise CadenError(f"`clock.{name}` cannot be read from {path}: {str(error).splitlines()[0]}.") from None
    if rows.shape[1] != count or not np.isfinite(rows).all():
        raise CadenError(f"`clock.{name}`: {path} must have {count} finite numbers per line, got {rows.shape[1]}.")
    return np.asarray(rows)


class Turn(NamedTuple):
    """Who makes a step next, and which of its steps it is."""

    index: int  # type: ignore[assignment]
    active: Tensor  # (m,) bool


class Timer:
    """The times of a run in "wait" mode, and what the other modes share."""

    may_sleep = False

    def __init__(self, clock: Clock, graph: Graph, draw: Draw):
        m, edges = graph.agents, len(graph.edges)
        self.clock, self.agents = clock, m
        self.compute = _Values("compute", clock.compute, m, draw, "agent")
        self._latency = _Values("latency", clock.latency, edges, draw, "edge")
        self._bandwidth = _Values("bandwidth", clock.bandwidth, edges, draw, "edge")
        self._up, self._down = (_Values(n, getattr(clock, n), m, draw, "agent") for n in ("up", "down"))
        first, second = graph.edges.T
        self.owner, self.peer = np.concatenate([first, second]), np.concatenate([second, first])  # of each arc
        # Set by the run: (m,) gradients so far, and local steps in a round.
        self.gradients: Callable[[], np.ndarray] = lambda: np.zeros(m, np.int64)
        self.planned: Callable[[int], np.ndarray] = lambda index: np.ones(m)
        zero = np.zeros(m)
        # Seconds: where each agent's own time stands, its computing time, and (m, m) how long i waited for j.
        self._state = {"now": zero.copy(), "busy": zero.copy(), "waited": np.zeros((m, m))}
        self._state |= {"charged": np.zeros(m, np.int64), "steps": np.zeros(m, np.int64)}
        self._state |= {"up": zero.copy(), "down": zero.copy()}  # when an agent's own connection is free again

    @property
    def time(self) -> float:
        """Simulated seconds since the start, until the last agent has done what was counted."""
        owed = self.compute(self._index) * (self.gradients() - self._state["charged"])
        return float((self._state["now"] + owed).max())

    _index = 0

    def columns(self) -> dict[str, float]:
        """Return the columns of a history."""
        time = self.time
        idle = 1 - self._state["busy"] / time if time > 0 else np.zeros(self.agents)
        return {"time": time, "idle": float(idle.mean()), "idle_most": float(idle.max())}

    def table(self) -> dict[str, np.ndarray]:
        """Return (m,) shares of the time that each agent computed, and how many steps it made; (m, m) who waited."""
        busy = self._state["busy"] / max(self.time, 1e-300)
        return {"busy": busy, "idle": 1 - busy, "steps": self._state["steps"], "waited": self._state["waited"]}

    def charge(self, index: int) -> np.ndarray:
        """Add the computing time of the gradients since the last call; return (m,) how many they were."""
        self._index = index
        total = self.gradients()
        new = total - self._state["charged"]
        seconds = self.compute(index) * new
        self._state["busy"] += seconds
        self._state["charged"] = total.copy()
        self._spend(seconds)
        return np.asarray(new)

    def _spend(self, seconds: np.ndarray) -> None:
        self._state["now"] += seconds

    def travel(self, index: int, sizes: np.ndarray, begin: np.ndarray) -> np.ndarray:
        """Return (2E,) when messages of some bytes arrive that agents send at `begin` (m,); 0 bytes: never sent."""
        sent = sizes > 0
        if not sent.any():
            return np.full(len(sizes), -np.inf)
        begin = np.maximum(begin, self._state["up"]) if np.isfinite(self._up(index)).any() else begin
        leave = begin[self.owner] + self._shared(self.owner, np.where(sent, sizes, 0), self._up(index))
        np.maximum.at(self._state["up"], self.owner, np.where(sent, leave, 0))
        links = np.concatenate([self._latency(index)] * 2), np.concatenate([self._bandwidth(index)] * 2)
        arrival = np.where(sent, leave + links[0] + sizes / links[1], -np.inf)
        if np.isfinite(self._down(index)).any():
            order = np.argsort(arrival, kind="stable")
            free, rate = self._state["down"], self._down(index)
            for arc in order[sent[order]]:
                j = self.peer[arc]
                arrival[arc] = free[j] = max(free[j], arrival[arc]) + sizes[arc] / rate[j]
        return np.asarray(arrival)

    def _shared(self, owner: np.ndarray, sizes: np.ndarray, rate: np.ndarray) -> np.ndarray:
        """Return how long the messages of each agent, one after the other, take over its own connection."""
        if not np.isfinite(rate).any():
            return np.zeros(len(sizes))
        order = np.argsort(owner, kind="stable")
        total = np.cumsum(sizes[order])
        before = np.concatenate([[0.0], total])[np.searchsorted(owner[order], owner[order])]
        out = np.empty(len(sizes))
        out[order] = (total - before) / rate[owner[order]]
        return out

    def exchange(self, index: int, sizes: np.ndarray) -> None:
        """Let messages of (2E,) bytes travel along the arcs, and everybody wait for theirs."""
        self.charge(index)
        now = self._state["now"]
        arrival = self.travel(index, sizes, now)
        latest = now.copy()
        np.maximum.at(latest, self.peer, arrival)
        late = latest - now
        for arc in np.flatnonzero((arrival == latest[self.peer]) & (late[self.peer] > 0)):
            self._state["waited"][self.peer[arc], self.owner[arc]] += late[self.peer[arc]]
            late[self.peer[arc]] = 0.0  # the first of several that came last
        self._state["now"] = latest

    def barrier(self, index: int, size: float, hops: int) -> None:
        """Let everybody wait for everybody: messages of some bytes that travel some links, one after the other."""
        self.charge(index)
        way = float(np.max(self._latency(index) + size / self._bandwidth(index)))
        self._state["now"][:] = self._state["now"].max() + hops * way

    def turn(self, index: int, active: Tensor) -> Turn:
        """Return who takes part in the next step, given the schedule's (m,) `active`."""
        return Turn(index, active)

    def end_turn(self, turn: Turn) -> int:
        """Note that the step is done, and return how many rounds are."""
        self._state["steps"] += turn.active.numpy()
        return turn.index + 1

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must hold."""
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in self._state.items()}

    def restore(self, buffers: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `buffers` returned."""
        self._state = {name: buffers[name].numpy().copy() for name in self._state}


class DeadlineTimer(Timer):
    """Rounds of limited length: who is not ready at the end of one counts as asleep in it."""

    may_sleep = True

    def __init__(self, clock: Clock, graph: Graph, draw: Draw):
        super().__init__(clock, graph, draw)
        # Seconds of work left (negative: none), and gradients and seconds of each agent's last step (0: unknown).
        self._state |= {"left": np.full(self.agents, -1.0), "expected": np.zeros(self.agents)}
        self._state |= {"took": np.zeros(self.agents), "round": np.zeros(2)}  # length of the round, size of a message

    @property
    def time(self) -> float:
        return float(self._state["now"].max())

    def _spend(self, seconds: np.ndarray) -> None:
        """Rounds pass by themselves."""

    def exchange(self, index: int, sizes: np.ndarray) -> None:
        self._state["round"][1] = max(float(sizes.max(initial=0.0)), self._state["round"][1])

    def barrier(self, index: int, size: float, hops: int) -> None:
        """Costs nothing: the deadline covers it."""

    def turn(self, index: int, active: Tensor) -> Turn:
        state = self._state
        begins = (state["left"] < 0) & active.numpy()
        gradients = np.where(state["expected"] > 0, state["expected"], self.planned(index))
        size = np.full(len(self.owner), state["round"][1])
        way = np.zeros(self.agents)
        kept = state["up"].copy(), state["down"].copy()
        state["up"][:], state["down"][:] = 0.0, 0.0  # an estimate, as if nothing else were on the way
        np.maximum.at(way, self.owner, self.travel(index, size, np.zeros(self.agents)))
        state["up"], state["down"] = kept
        seconds = self.compute(index) * gradients + np.maximum(way, 0)
        state["left"][begins] = seconds[begins]
        working, spec = state["left"] >= 0, self.clock.deadline
        known = np.where(state["took"] > 0, state["took"], seconds)
        limit = float(np.quantile(known, spec["quantile"])) if isinstance(spec, Mapping) else float(spec or 0)
        ready = working & (state["left"] <= limit * (1 + 1e-12))
        state["round"][0] = float(state["left"][working].max()) if working.any() and ready[working].all() else limit
        state["took"] = np.where(begins, seconds, state["took"])
        return Turn(index, torch.from_numpy(ready))

    def end_turn(self, turn: Turn) -> int:
        made, state, ready = self.charge(turn.index), self._state, turn.active.numpy()
        length = state["round"][0]
        state["now"] += length
        state["expected"] = np.where(ready, made, state["expected"])
        state["left"] = np.where(ready, -1.0, np.where(state["left"] >= 0, state["left"] - length, -1.0))
        return super().end_turn(turn)


class FreeTimer(Timer):
    """Steps at each agent's own pace, and messages that are there when they have arrived (`Mail`).

    The length of a step is known when its gradients are counted, which is at its end. So a step is taken to end when
    the agent's last number of gradients would be done, and the next one begins later if there were more.
    """

    may_sleep = True

    def __init__(self, clock: Clock, graph: Graph, draw: Draw):
        super().__init__(clock, graph, draw)
        if (self.compute(0) <= 0).any():
            raise CadenError('`clock.compute` must be positive in the mode "free": steps would take no time.')
        self._state |= {"ends": np.full(self.agents, -1.0), "expected": np.zeros(self.agents)}
        self._sent: list[tuple[int, int, float, Tensor]] = []  # arc, number, arrival, row, of messages under way
        self._newest = np.full(len(self.owner), -1)  # number of the newest message that each arc's peer has taken
        self._turn = Turn(0, torch.ones(self.agents, dtype=torch.bool))  # all begin

    @property
    def time(self) -> float:
        return float(self._state["now"].max())

    def exchange(self, index: int, sizes: np.ndarray) -> None:
        """Nobody waits; see `deliver`."""

    def turn(self, index: int, active: Tensor) -> Turn:
        state = self._state
        if (state["ends"] < 0).any():  # the first steps
            state["expected"] = self.planned(0).astype(float)
            state["ends"] = state["now"] + self.compute(0) * state["expected"]
        first = state["ends"] == state["ends"].min()
        count = int(state["steps"][first].min())
        self._turn = Turn(count, torch.from_numpy(first & (state["steps"] == count)))
        return self._turn

    def deliver(self, arcs: Tensor, sends: Tensor) -> tuple[Tensor, Tensor]:
        """Send the messages of the agents that step now; return the newest ones that have come, and where."""
        index, state, active = self._turn.index, self._state, self._turn.active.numpy()
        moment = float(state["ends"][active].min())
        made = self.charge(index)
        uncounted = active & (made == 0)  # a solver without gradients takes as long as its steps
        made = np.where(uncounted, self.planned(index), made)
        state["now"] += np.where(uncounted, self.compute(index) * made, 0)
        done = np.maximum(moment, state["now"])  # of those that stepped
        going = sends.squeeze(1).cpu().numpy() & active[self.owner]
        sizes = np.where(going, float(arcs.shape[1] * arcs.element_size()), 0.0)
        arrival = self.travel(index, sizes, done)
        for arc in np.flatnonzero(going):
            self._sent.append((int(arc), index, float(arrival[arc]), arcs[arc].clone()))
        state["now"] = np.where(active, done, state["now"])
        state["expected"] = np.where(active, made, state["expected"])
        return self._delivered(arcs, active, moment)

    def _spend(self, seconds: np.ndarray) -> None:
        self._state["now"] += np.where(self._turn.active.numpy(), seconds, 0)

    def _delivered(self, arcs: Tensor, active: np.ndarray, moment: float) -> tuple[Tensor, Tensor]:
        """Return the newest messages that have arrived at the agents that step now."""
        half = len(self.owner) // 2
        received, came = torch.zeros_like(arcs), torch.zeros(len(arcs), 1, dtype=torch.bool, device=arcs.device)
        waiting = []
        for arc, number, arrival, row in self._sent:
            if not active[self.peer[arc]] or arrival > moment:
                waiting.append((arc, number, arrival, row))
            elif number > self._newest[arc]:
                at = (arc + half) % (2 * half)  # the arc of the receiver
                self._newest[arc], received[at], came[at] = number, row, True
        self._sent = waiting
        return received, came

    def end_turn(self, turn: Turn) -> int:
        state, active = self._state, turn.active.numpy()
        state["steps"] += active
        coming = self.compute(turn.index + 1) * state["expected"]
        state["ends"] = np.where(active, state["now"] + coming, state["ends"])
        return int(state["steps"].min())

    def buffers(self) -> dict[str, Tensor]:
        known = {**super().buffers(), "newest": torch.from_numpy(self._newest)}
        if self._sent:
            arcs, numbers, arrivals, rows = zip(*self._sent)
            numbers_of = torch.tensor([arcs, numbers], dtype=torch.int64)
            known |= {"mail": numbers_of, "arrivals": torch.tensor(arrivals, dtype=torch.float64)}
            known["rows"] = torch.stack(rows)
        return known

    def restore(self, buffers: Mapping[str, Tensor]) -> None:
        super().restore(buffers)
        self._newest = buffers["newest"].numpy().copy()
        if "rows" in buffers:
            arcs, numbers = buffers["mail"].tolist()
            self._sent = list(zip(arcs, numbers, buffers["arrivals"].tolist(), buffers["rows"].unbind(0)))


class Mail(Memory):
    """The transport of all agents of this process, by a clock."""

    late = True

    def __init__(self, timer: FreeTimer):
        self._timer, self._index, self._exchanges = timer, -1, 0

    def begin_round(self, index: int) -> None:
        self._index, self._exchanges = index, 0

    def share_rows(self, rows: Tensor, active: Tensor) -> Tensor:
        if self._index >= 0:
            raise self._refusal()
        return rows

    def exchange_arcs(self, arcs: Tensor, sends: Tensor, comes: Tensor) -> tuple[Tensor, Tensor | None]:
        self._exchanges += 1
        if self._exchanges > 1:
            raise self._refusal()
        return self._timer.deliver(arcs, sends)

    def _refusal(self) -> CadenError:
        return CadenError(
            'The mode "free" needs a method whose rounds are a single exchange over arcs (caden, radmm, lt_admm).'
        )


def make_timer(clock: Clock | None, graph: Graph, draw: Draw) -> Timer | None:
    """Return the times of a run."""
    if clock is None:
        return None
    kinds: dict[str, type[Timer]] = {"wait": Timer, "deadline": DeadlineTimer, "free": FreeTimer}
    return kinds[clock.mode](clock, graph, draw)
