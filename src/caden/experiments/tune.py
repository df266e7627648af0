"""Tuning with equal budgets: successive halving (Jamieson and Talwalkar, "Non-stochastic best arm identification and
hyperparameter optimization", AISTATS 2016) over points of a Halton sequence in each method's search space.

Every method gets the same budget: `trials` points for `rounds` rounds each, the best third of them for three times as
many rounds, the best ninth for nine times as many. A trial ends early when it reaches the target. The fewest rounds
win. If no trial reaches the target, the highest accuracy wins, or, without accuracies, the smallest relative error.
Accuracy is measured on samples held out from the training set; the test set is not used.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from scipy.stats import qmc

from caden import data
from caden.engine.run_directory import Record
from caden.engine.warmup import start_point
from caden.errors import CadenError, RunError, require_choice, require_integer, require_positive
from caden.experiments.config import Experiment
from caden.experiments.store import RunStore, digest
from caden.experiments.theory import start_and_curvature
from caden.methods import CARDS, METHODS
from caden.registry import factory


class Tuned(NamedTuple):
    """The outcome of tuning a method."""

    parameters: dict[str, Any]  # of the best trial
    trials: pd.DataFrame  # one row per trial and rung: parameters, rounds, results
    record: Record  # of the best trial


def space_of(method: str, given: Mapping[str, Any] = {}, needed: bool = True) -> dict[str, Any]:
    """Return the search space of a method: `given`, else the one in its file, else three decades around a default.

    A function of your own may have a space as its attribute `space`. One without a positive default has none: an error
    if it is `needed`.
    """
    space = dict(given) or (dict(CARDS[method].space) if method in CARDS else {})
    if not space:
        function = factory("method", METHODS, {"name": method})
        own, signature = getattr(function, "space", {}), _signature(method, function)
        if not isinstance(own, Mapping):
            raise CadenError(f"The attribute `space` of {method} must be a dictionary of parameters, got {own!r}.")
        space = dict(own)
    if not space:
        numbers = [(k, p.default) for k, p in signature.parameters.items() if isinstance(p.default, float)]
        numbers = [(k, v) for k, v in numbers if v > 0]
        if needed and not numbers:
            raise CadenError(f"{method} has no search space: set one, such as `tune.{method}.alpha = [0.1, 0.3]`.")
        space = {name: {"low": default / 30, "high": default * 30} for name, default in numbers[:1]}
    for name, entry in space.items():
        if isinstance(entry, dict):
            where = f"tune.{method}.{name}"
            if not {"low", "high"} <= set(entry) <= {"low", "high", "unit"} or entry.get("unit") not in (None, *_UNITS):
                raise CadenError(f'`{where}` takes `low`, `high` and `unit` ("L" or "1/L"), got {entry!r}.')
            if require_positive(f"{where}.low", entry["low"]) > require_positive(f"{where}.high", entry["high"]):
                raise CadenError(f"`{where}`: `low` must not be above `high`, got {entry!r}.")
        elif not isinstance(entry, list) or not entry:
            raise CadenError(f"`tune.{method}.{name}` must be a range {{low, high, unit}} or a list, got {entry!r}.")
    factory("method", METHODS, {"name": method, **space})
    return space


def _signature(method: str, function: Any) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise CadenError(f"{method} is no function with named parameters that makes a method.") from None


_UNITS = ("L", "1/L")


def points(space: Mapping[str, Any], trials: int, curvature: float, seed: int = 0) -> list[dict[str, Any]]:
    """Return `trials` distinct, evenly spread points of a space, or all if it has fewer, with three-digit numbers.

    >>> points({"alpha": {"low": 0.1, "high": 10.0, "unit": "1/L"}, "form": ["atc", "semi_a"]}, 2, curvature=2.0)
    [{'alpha': 0.0789, 'form': 'atc'}, {'alpha': 0.789, 'form': 'semi_a'}]
    """
    chosen: list[dict[str, Any]] = []
    for row in qmc.Halton(len(space), seed=seed).random(8 * trials) if space else ():
        point: dict[str, Any] = {}
        for u, (name, entry) in zip(row.tolist(), space.items()):
            if isinstance(entry, dict):
                unit = {"L": curvature, "1/L": 1 / curvature}.get(entry.get("unit", ""), 1.0)
                low, high = math.log(entry["low"] * unit), math.log(entry["high"] * unit)
                point[name] = float(f"{math.exp(low + u * (high - low)):.3g}")
            else:
                point[name] = entry[int(u * len(entry))]
        if point not in chosen and len(chosen) < trials:
            chosen.append(point)
    return chosen


def score(record: Record) -> tuple[float, float]:
    """Return the sort key of a trial, smaller is better: rounds to the target, then accuracy or error."""
    end = record.summary
    if end["stopped"] == "diverged":
        return math.inf, math.inf
    if "best_accuracy" in end:
        reached = end.get("rounds_to_target")
        return math.inf if reached is None else float(reached), -float(end["best_accuracy"])
    error = record.rows[-1]["relative_error"]
    return math.inf, math.inf if error is None else float(error)


def held_out(config: Experiment) -> Experiment:
    """Return the experiment measured on held-out training samples, a sixth unless `validation` is set."""
    table = {k: v for k, v in config.problem.items() if k != "test_samples"}
    if table["name"] == "language":
        return config.model_copy(update={"problem": {"validation": 300, **config.problem}})
    if table["name"] != "classification":
        return config
    total = len(data.load(table.get("data", "digits"))[0][0])
    wanted = table.get("samples", total)
    count = table.get("validation") or wanted // 6
    if "samples" in table:
        table["samples"] = min(wanted, total - count)
    return config.model_copy(update={"problem": {**table, "validation": count}})


def curvature(store: RunStore, config: Experiment) -> float:
    """Return the largest L_i of the problem at the start of the runs, computed once for all methods."""
    key = digest(config.model_copy(update={"method": {}}))
    if key not in store.curvatures:
        largest = float(start_and_curvature(config, store.build(config)[0])[1].max())
        store.curvatures[key] = largest if largest > 0 else 1.0
    return store.curvatures[key]


def tune(store: RunStore, config: Experiment, method: str, trials: int = 18, rounds: int = 20) -> Tuned:
    """Search the space of a method with the given budget; the store keeps the runs."""
    require_integer("trials", trials, least=1), require_integer("rounds", rounds, least=1)
    space = space_of(method, config.tune.get(method, {}))
    base = held_out(config).model_copy(update={"tune": {}, "compare": {}, "record_every": 1})
    problem, _ = store.build(base)
    if config.target is not None and "accuracy" in problem.evaluate(start_point(problem)):
        base = base.model_copy(update={"stop_at_target": True})
    fixed = config.with_method(method).method
    candidates = points(space, trials, curvature(store, base), config.seed)
    alive = {number: {**fixed, **point} for number, point in enumerate(candidates)}
    rows: list[dict[str, Any]] = []
    best: dict[int, Record] = {}
    for rung in range(3):
        length = rounds * 3**rung
        todo = {n: p for n, p in alive.items() if n not in best or score(best[n])[0] == math.inf}
        plans = {f"trial {n}": base.model_copy(update={"method": p, "rounds": length}) for n, p in todo.items()}
        done = store.run(f"tune {method}, {length} rounds:", plans)
        best |= {n: done[f"trial {n}"] for n in todo}
        for n in todo:
            end = best[n].summary
            columns = ("round", "rounds_to_target", "best_accuracy", "relative_error", "stopped", "seconds")
            row = {"trial": n, "rung": rung + 1, **{k: alive[n][k] for k in space}}
            rows.append({**row, **{k: end[k] for k in columns if k in end}, "run": best[n].path.name})
        ranked = sorted(alive, key=lambda n: (*score(best[n]), n))
        alive = {n: alive[n] for n in ranked[: max(1, math.ceil(len(alive) / 3))]}
    winner = next(iter(alive))
    if best[winner].summary["stopped"] == "diverged":
        raise RunError(f"Every trial of {method} diverged: set another search space with `tune.{method}`.")
    return Tuned({k: v for k, v in alive[winner].items() if k != "name"}, pd.DataFrame(rows), best[winner])


def tune_experiment(
    config: Experiment, methods: Sequence[str], store: RunStore, trials: int = 18, rounds: int = 20
) -> dict[str, Tuned]:
    """Tune several methods; write trials.csv and tuned.toml, with which `compare` runs the winners on the test set."""
    for name in methods:
        space_of(name, config.tune.get(name, {}))
    for name in config.tune:
        require_choice("key", f"tune.{name}", [f"tune.{n}" for n in methods])
    tuned = {name: tune(store, config, name, trials, rounds) for name in methods}
    all_trials = pd.concat([t.trials.assign(method=name) for name, t in tuned.items()], ignore_index=True)
    all_trials.to_csv(store.folder / "trials.csv", index=False, lineterminator="\n")
    problem = {k: v for k, v in config.problem.items() if k != "validation"}
    best = {name: t.parameters for name, t in tuned.items()}
    winners = config.model_copy(update={"compare": best, "tune": {}, "problem": problem})
    (store.folder / "tuned.toml").write_text(winners.to_toml())
    return tuned
