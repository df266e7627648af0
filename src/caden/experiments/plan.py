"""Plan before buying machines: which method, with which settings, reaches a target first on a given network.

Every variant of an experiment runs in the simulator, by its clock, until it reaches the target. Two more runs, with a
tenth and with ten times all bandwidths, give its time at any bandwidth b in between: computing and latency stay, and
sending goes with 1/b. In the mode "wait" this is exact while the same agents remain the slowest; in the others it is an
estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from caden.engine.figures import Figure, draw
from caden.engine.history import Row
from caden.engine.run_directory import Record, RunDirectory
from caden.errors import CadenError, Interrupted, require_choice, require_fraction
from caden.experiments.config import Experiment, has_solver
from caden.experiments.store import RunStore
from caden.methods import CARDS, CONDITIONS, METHODS, not_survived
from caden.networks.clock import MODES, Clock
from caden.networks.messages import Messages

QUANTILE = 0.7  # deadline of a round, unless the experiment has one
FACTORS = (0.1, 1.0, 10.0)  # of the bandwidth
STEPS = ("auto", 5)
SHORT: tuple[dict[str, Any], ...] = ({}, {"bits": 4})


class Variant(NamedTuple):
    """One way to run the experiment, and what it takes to reach the target."""

    method: str
    local_steps: int | str  # "": the method does not choose
    mode: str
    messages: str
    reached: bool
    time: float | None = None  # simulated seconds
    bytes_per_agent: float | None = None
    gradients: int | None = None
    rounds: int | None = None
    times: tuple[float, ...] = ()  # at `FACTORS` of the bandwidth; infinite: not reached
    awake: str = ""  # participation, if several were tried

    @property
    def label(self) -> str:
        steps = "" if self.local_steps == "" else f"{self.local_steps} steps"
        return ", ".join(filter(None, (self.method, self.mode, self.awake, steps, self.messages)))

    def time_at(self, factor: float) -> float:
        """Return the time at `factor` times the bandwidth; infinite if it is not known."""
        if self.time is None or (factor != 1 and not self.times):
            return math.inf
        return self.time if factor == 1 else sum(self.parts(factor) * np.array([1, 1 / factor]))

    def parts(self, factor: float) -> np.ndarray:
        """Return the fixed part of the time near `factor`, and the part that goes with 1 / factor."""
        half = 0 if factor < 1 else 1
        (a, b), (slow, fast) = FACTORS[half : half + 2], self.times[half : half + 2]
        sending = (slow - fast) / (1 / a - 1 / b) if math.isfinite(slow) else math.inf
        return np.array([fast - sending / b if math.isfinite(sending) else math.inf, sending])


class Plan(NamedTuple):
    """All variants, the fastest first, and which is the fastest at other bandwidths."""

    variants: list[Variant]
    skipped: dict[str, str]  # variant -> why it was not run
    best_from: list[tuple[float, str]]  # factor of the bandwidth from which on a variant is the fastest, ascending
    picture: Path


def plan(
    config: Experiment,
    store: RunStore,
    methods: Sequence[str] = ("caden", "gt", "adapd"),
    modes: Sequence[str] = MODES,
    steps: Sequence[int | str] = STEPS,
    messages: Sequence[Mapping[str, Any]] = SHORT,
    deadlines: Sequence[float] = (),
    participation: Sequence[float] = (),
) -> Plan:
    """Run all variants that the methods allow; the store keeps the runs.

    `deadlines` are quantiles of the agents' times; by default the experiment's own deadline, else 0.7. `participation`
    is by default the experiment's own.
    """
    clock = Clock.from_spec(config.clock)
    if clock is None:
        raise CadenError("The experiment has no `[clock]`: say how long computing and sending take (docs/time.md).")
    if config.target is None and config.tolerance is None:
        raise CadenError("A plan needs a `target` accuracy (`--target`) or a `tolerance`.")
    if not (methods and modes and steps):
        raise CadenError("A plan needs at least one method, mode and number of steps.")
    for name in methods:
        if ":" not in name:
            require_choice("method", name, METHODS)
    for mode in modes:
        require_choice("mode", mode, MODES)
    limits: dict[str, list[dict[str, Any]]] = {
        "wait": [{}],
        "deadline": [{"deadline": {"quantile": require_fraction("deadline", q, "(0, 1]")}} for q in deadlines]
        or [{"deadline": clock.deadline or {"quantile": QUANTILE}}],
        "free": [{"tick": clock.tick}],
    }
    levels = [require_fraction("participation", share, "(0, 1]") for share in participation]
    if config.target is not None:
        config = config.model_copy(update={"tolerance": None})  # one goal
    plans: dict[Variant, Experiment] = {}
    skipped: dict[str, str] = {}
    for variant, settings in _variants(config, clock, methods, {m: limits[m] for m in modes}, steps, messages, levels):
        if why := _excluded(settings):
            skipped[variant._replace(local_steps="").label] = why
        else:
            plans[variant] = settings
    if not plans:
        raise CadenError(f"No variant can run: {'; '.join(f'{label}: {why}' for label, why in skipped.items())}.")
    rates = [value for value in (clock.bandwidth, clock.up, clock.down) if value is not None]
    limited = bool(rates) and not any(isinstance(rate, Mapping) and "file" in rate for rate in rates)
    goal = "tolerance" if config.target is None else "target"
    done = _run(store, "plan:", {v.label: c for v, c in plans.items()}, skipped)
    plans = {v: c for v, c in plans.items() if v.label in done}
    reached = [v for v in plans if done[v.label].summary["stopped"] == goal]
    elsewhere: dict[float, dict[str, Record]] = {1.0: done}
    for factor in (f for f in FACTORS if f != 1 and limited):
        changed = {v.label: _at_bandwidth(plans[v], factor) for v in reached}
        elsewhere[factor] = store.run(f"plan, {factor:g} times the bandwidth:", changed)
    variants = sorted(
        (_measured(v, {f: runs[v.label] for f, runs in elsewhere.items() if v.label in runs}, goal) for v in plans),
        key=lambda v: math.inf if v.time is None else v.time,
    )
    picture = store.folder / "plan.png"
    _draw(variants, done, config.target, picture)
    return Plan(variants, skipped, _envelope(variants) if limited else [], picture)


def _run(store: RunStore, title: str, configs: Mapping[str, Experiment], skipped: dict[str, str]) -> dict[str, Record]:
    """Run all; those that are refused are noted in `skipped`. If all are, raise why."""
    try:
        return store.run(title, configs)
    except Interrupted:
        raise
    except CadenError:
        done: dict[str, Record] = {}
        for label, config in configs.items():  # what has been run is read
            try:
                done |= store.run(title, {label: config})
            except Interrupted:
                raise
            except CadenError as error:
                last, skipped[label] = error, str(error).removeprefix(f"{store.path(config).name}: ")
        if not done:
            raise CadenError(str(last).removeprefix(f"{store.path(config).name}: ")) from None
        return done


def _variants(
    config: Experiment,
    clock: Clock,
    methods: Sequence[str],
    limits: Mapping[str, Sequence[Mapping[str, Any]]],
    steps: Sequence[int | str],
    messages: Sequence[Mapping[str, Any]],
    participation: Sequence[float],
) -> Iterable[tuple[Variant, Experiment]]:
    settings = {k: v for k, v in asdict(clock).items() if v is not None and k not in ("mode", "deadline", "tick")}
    ways = [(mode, limit, len(each) > 1) for mode, each in limits.items() for limit in each]
    for method in methods:
        base = config.with_method(method)
        chooses = has_solver(method)
        works = steps if chooses else [next((s for s in steps if isinstance(s, int)), 5)]
        shares: Sequence[Any] = participation or [config.participation]
        for work, (mode, limit, several), table, share in product(works, ways, messages, shares):
            text = ", ".join(f"{key} {value}" for key, value in table.items())
            changed = {
                "local_steps": work,
                "clock": {**settings, "mode": mode, **limit},
                "messages": {**config.messages, **table},
                "participation": share,
                "stop_at_target": config.target is not None,
            }
            name = f"{mode} {limit['deadline']['quantile']:g}" if several else mode
            awake = f"{share:g} awake" if participation else ""
            variant = Variant(method, work if chooses else "", name, text, False, awake=awake)
            yield variant, base.model_copy(update=changed)


def _excluded(config: Experiment) -> str:
    """Return why a variant cannot run, or ""."""
    method, mode = config.method["name"], (config.clock or {})["mode"]
    card, messages = CARDS.get(method), Messages.from_spec(config.messages)
    if mode == "free":
        if card is not None and not card.free:
            return "needs a single exchange over arcs"
        if messages._replace(top=None, bits=None) != Messages() or config.participation != 1.0 or config.links != 1.0:
            return "the mode has delays of its own"
    present = {"sleep": mode == "deadline" or config.participation != 1.0, "compression": messages.shared_copies}
    if card is not None and (fatal := not_survived(method, present)):
        return f"does not survive {CONDITIONS[fatal[0]]}"
    if messages.shared_copies and config.links != 1.0:
        return "short messages need links that stay"
    if messages.shared_copies and messages.unreliable and card is not None and "loss" not in card.survives:
        return "short broadcasts must all arrive"
    return ""


def _at_bandwidth(config: Experiment, factor: float) -> Experiment:
    clock = Clock.from_spec(config.clock)
    assert clock is not None
    scaled = asdict(clock.with_bandwidth(factor))
    return config.model_copy(update={"clock": {k: v for k, v in scaled.items() if v is not None}})


def _measured(variant: Variant, runs: Mapping[float, Record], goal: str) -> Variant:
    """Return the variant with what its runs took, by the factor of their bandwidth."""
    record = runs[1.0]
    graph = RunDirectory(record.path).graph()
    if record.summary["stopped"] != goal or graph is None:
        return variant
    end: Row = record.rows[-1]
    known = (runs[f] for f in FACTORS) if len(runs) == len(FACTORS) else ()
    times = (float(r.rows[-1]["time"] or 0) if r.summary["stopped"] == goal else math.inf for r in known)
    return variant._replace(
        reached=True,
        time=float(end["time"] or 0),
        bytes_per_agent=float(end["bytes"] or 0) / graph.agents,
        gradients=int(end["gradients"] or 0),
        rounds=int(end["round"] or 0),
        times=tuple(times),
    )


def _envelope(variants: Sequence[Variant]) -> list[tuple[float, str]]:
    """Return which variant is the fastest from which factor of the bandwidth on, between a tenth and ten times it."""
    known, crossings = [v for v in variants if v.times], set(FACTORS)
    for a, b in combinations(known, 2):
        for low, high in pairwise(FACTORS):
            fixed, sending = a.parts(math.sqrt(low * high)) - b.parts(math.sqrt(low * high))
            if math.isfinite(fixed) and fixed != 0 and low < -sending / fixed < high:
                crossings.add(-sending / fixed)
    grid = sorted(crossings)
    best: list[tuple[float, str]] = []
    for low, high in pairwise(grid):
        fastest = min(known, key=lambda v: v.time_at(math.sqrt(low * high)), default=None)
        if fastest is None or not math.isfinite(fastest.time_at(math.sqrt(low * high))):
            continue
        if not best or best[-1][1] != fastest.label:
            best.append((low, fastest.label))
    return best


def _draw(variants: Sequence[Variant], done: Mapping[str, Record], target: float | None, path: Path) -> None:
    """Draw the best variant of each method and mode against simulated time."""
    path.unlink(missing_ok=True)  # of another plan
    best: dict[tuple[str, str], Variant] = {}
    for variant in variants:  # the fastest first
        if variant.reached:
            best.setdefault((variant.method, variant.mode), variant)
    histories = {f"{v.method}, {v.mode}": [done[v.label].history] for v in best.values()}
    if not histories:
        return
    measure = "accuracy" if all("accuracy" in h[0] for h in histories.values()) else "relative_error"
    title = "best variant of each method and mode"
    draw([Figure("plan", title, measure, histories, x="time", target=target)], path)
