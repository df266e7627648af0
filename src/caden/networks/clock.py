"""A clock for the simulator: how long agents compute and how long messages travel.

Times are numbers, so nothing here depends on the speed of this machine. Draws are pure functions of (seed, label,
round). `timers` and `mail` add the times up.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from caden.draws import Draw
from caden.errors import CadenError, require_choice, require_flag, require_number, require_positive

MODES = ("wait", "deadline", "free")
Value = float | Sequence[float] | Mapping[str, Any] | None
# Distributions with mean 1, by their parameter.
_SHAPES: dict[str, Callable[[float, np.ndarray], np.ndarray]] = {
    "exponential": lambda spread, u: stats.expon.ppf(u),
    "lognormal": lambda spread, u: np.exp(spread * stats.norm.ppf(u) - spread**2 / 2),
    "uniform": lambda spread, u: 1 + spread * (2 * u - 1),
}
_SHORTEST = 1e-9  # seconds of a tick
_LARGEST = 1e15  # of any value: sums must stay finite and exact enough
_WIDEST = {"exponential": np.inf, "lognormal": 10.0, "uniform": 1.0}  # spread


@dataclass(frozen=True)
class Clock:
    """How long everything takes in a simulated network, in seconds and bytes per second.

    Every value is a number, one per agent (or per edge), a table {"name": "lognormal", "mean": 0.2, "spread": 0.5}, or
    {"file": "trace.csv"} with a line per round, repeated, and a column per agent or edge. Distributions are
    "exponential", "lognormal" (spread: deviation of the logarithm) and "uniform" (spread: largest relative deviation);
    with `"per": "agent"` (or "edge") a value is drawn once, with `"per": "round"`, the default, in every round.

    compute: seconds per gradient.
    overhead: seconds per step besides its gradients.
    serve: seconds per step of work on messages that an agent can do while it waits for those of others; without a wait
        ("deadline", "free") it is overhead.
    latency, bandwidth: of each edge (in the order of `graph.edges`) in each direction; bandwidth None is unlimited.
        Messages over one edge queue.
    up, down: bandwidth of an agent's own connection, which its messages share.
    pull: messages are announced, asked for and sent, as between peers: they travel three times the latency, and free
        agents ask for the newest one when they have used the last one.
    mode: "wait": an agent continues when the messages of its neighbours are there, as peers in lockstep do.
        "deadline": a round ends after some seconds; who is not ready then counts as asleep in it, and takes part in the
        first round in which it is ready, with the anchors of that round. "free": there are no rounds; an agent makes
        its next step when it has finished the last one, with the newest messages that have arrived.
    deadline: length of a round in "deadline" mode: seconds, or {"quantile": 0.8} of the agents' last times.
    tick: steps of free agents end at multiples of this many seconds, and those that end together are computed together,
        which very large networks need; 0: at any time.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=4, dim=2), caden.graphs.ring(4)
    >>> clock = caden.Clock(compute=[0.5, 0.5, 0.5, 2.0], latency=0.25)
    >>> result = caden.simulate(caden.methods.dgd(0.02), problem, graph, rounds=10, clock=clock)
    >>> result.rows[-1]["time"], result.agents["busy"].round(2).tolist()
    (22.0, [0.25, 0.25, 0.25, 1.0])
    """

    compute: Value = 0.1
    overhead: Value = 0.0
    serve: Value = 0.0
    latency: Value = 0.0
    bandwidth: Value = None
    up: Value = None
    down: Value = None
    pull: bool = False
    mode: str = "wait"
    deadline: float | Mapping[str, float] | None = None
    tick: float = 0.0

    @classmethod
    def from_spec(cls, spec: Clock | Mapping[str, Any] | None) -> Clock | None:
        """Return the checked clock that `spec` describes; None if there is none."""
        if spec is None:
            return None
        if not isinstance(spec, Mapping | Clock):
            raise CadenError(f"`clock` must be a Clock or a table, got {spec!r}.")
        if isinstance(spec, Mapping):
            names = [field.name for field in fields(cls)]
            for key in spec:
                require_choice("key", f"clock.{key}", [f"clock.{name}" for name in names])
            spec = cls(**spec)
        require_choice("clock.mode", spec.mode, MODES)
        if spec.mode == "deadline" and spec.deadline is None:
            raise CadenError('`clock.mode = "deadline"` needs `clock.deadline`: seconds, or {quantile = 0.7}.')
        if spec.mode != "deadline" and spec.deadline is not None:
            raise CadenError(f'`clock.deadline` belongs to the mode "deadline", but `clock.mode` is {spec.mode!r}.')
        if isinstance(spec.deadline, Mapping):
            quantile = spec.deadline.get("quantile")
            if set(spec.deadline) != {"quantile"} or not 0 < require_number("clock.deadline.quantile", quantile) <= 1:
                raise CadenError(f"`clock.deadline` must be seconds or a quantile in (0, 1], got {spec.deadline!r}.")
        elif spec.deadline is not None:
            require_positive("clock.deadline", spec.deadline)
        require_flag("clock.pull", spec.pull)
        if spec.tick != 0 and (require_positive("clock.tick", spec.tick) < _SHORTEST or spec.mode != "free"):
            raise CadenError(f'`clock.tick` belongs to the mode "free" and is at least {_SHORTEST:g}, got {spec.tick}.')
        return spec

    def fingerprint(self) -> str:
        """Return a digest of all values, also of those in files."""
        values = asdict(self)
        text = json.dumps(values, sort_keys=True, default=lambda value: np.asarray(value).tolist())
        digest = hashlib.blake2b(text.encode(), digest_size=8)
        for name, value in values.items():
            if isinstance(value, Mapping) and "file" in value:
                try:
                    digest.update(Path(str(value["file"])).read_bytes())
                except OSError as error:
                    raise _unreadable(name, value["file"], error) from None
        return digest.hexdigest()

    def with_bandwidth(self, factor: float) -> Clock:
        """Return the same clock with all bandwidths multiplied."""
        bandwidth, up, down = (_scaled(name, getattr(self, name), factor) for name in ("bandwidth", "up", "down"))
        return replace(self, bandwidth=bandwidth, up=up, down=down)


class Values:
    """The values of one field: (n,) numbers for each round."""

    def __init__(self, name: str, spec: Value, count: int, draw: Draw, unit: str):
        self._name, self._count, self._draw, self._rows = name, count, draw, np.empty((0, 0))
        self._table = spec if isinstance(spec, Mapping) else {}
        if "file" in self._table:
            if others := sorted(self._table.keys() - {"file"}):
                raise CadenError(f"`clock.{name}` comes from a file: remove {', '.join(map(repr, others))}.")
            self._rows = _trace(name, Path(str(self._table["file"])), count)
        elif self._table:
            self._check(unit)
        elif spec is None:
            self._rows = np.full((1, count), np.inf)
        else:
            self._rows = np.broadcast_to(_numbers(name, spec, count, unit), (1, count))
        low = 0 if name in ("latency", "compute", "overhead", "serve") else np.finfo(float).tiny
        sound = (self._rows <= _LARGEST).all() or (spec is None and low > 0)  # without a bandwidth there is no limit
        if len(self._rows) and not (sound and (self._rows >= low).all()):
            raise CadenError(
                f"`clock.{name}` must be {'at least 0' if low == 0 else 'positive'} and at most 1e15, got {spec!r}."
            )

    def _check(self, unit: str) -> None:
        known = ["name", "mean", "spread", "per"]
        for key in self._table:
            require_choice("key", f"clock.{self._name}.{key}", [f"clock.{self._name}.{k}" for k in known])
        require_choice(f"distribution of `clock.{self._name}`", self._table.get("name"), _SHAPES)
        if require_positive(f"clock.{self._name}.mean", self._table.get("mean")) > _LARGEST:
            raise CadenError(f"`clock.{self._name}.mean` must be at most 1e15, got {self._table['mean']}.")
        require_choice(f"clock.{self._name}.per", self._table.get("per", "round"), ("round", unit))
        if self._table["name"] == "exponential" and "spread" in self._table:
            raise CadenError(f"`clock.{self._name}`: an exponential distribution has no `spread`; remove it.")
        self._spread = require_number(f"clock.{self._name}.spread", self._table.get("spread", 0.5))
        widest = _WIDEST[self._table["name"]]
        if not 0 < self._spread <= widest:
            raise CadenError(f"`clock.{self._name}.spread` must lie in (0, {widest:g}], got {self._spread}.")

    def __call__(self, round: int) -> np.ndarray:
        if len(self._rows):
            return np.asarray(self._rows[max(round, 0) % len(self._rows)])
        index = round if self._table.get("per", "round") == "round" else -1
        u = self._draw.uniform(f"clock/{self._name}", index, self._count)
        return np.asarray(float(self._table["mean"]) * _SHAPES[self._table["name"]](self._spread, u))


def _numbers(name: str, spec: Any, count: int, unit: str) -> np.ndarray:
    several = (isinstance(spec, np.ndarray) and spec.ndim == 1) or isinstance(spec, list | tuple | range)
    values = list(spec) if several else [spec.item() if isinstance(spec, np.ndarray) and spec.ndim == 0 else spec]
    for value in values:
        require_number(f"clock.{name}", value)
    if len(values) not in (1, count):
        raise CadenError(f"`clock.{name}` must be a number or one per {unit} ({count}), got {len(values)}.")
    return np.array(values, dtype=float)


def _scaled(name: str, spec: Value, factor: float) -> Value:
    if spec is None:
        return None
    if not isinstance(spec, Mapping):
        return [value * factor for value in spec] if isinstance(spec, Sequence) else spec * factor
    if "file" in spec:
        raise CadenError(f"`clock.{name}` comes from a file and cannot be scaled.")
    return {**spec, "mean": spec["mean"] * factor}


def _unreadable(name: str, path: Any, error: Exception) -> CadenError:
    return CadenError(f"`clock.{name}` cannot be read from {path}: {str(error).splitlines()[0].rstrip('.')}.")


def _trace(name: str, path: Path, count: int) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty file
            rows = np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise _unreadable(name, path, error) from None
    if not len(rows):
        raise CadenError(f"`clock.{name}`: {path} is empty.")
    if rows.shape[1] != count or not np.isfinite(rows).all():
        raise CadenError(f"`clock.{name}`: {path} must have {count} finite numbers per line, got {rows.shape[1]}.")
    return np.asarray(rows)
