"""A tournament: in each cell every method is tuned with the same budget, and its best parameters run with every seed.

Tuning is successive halving over points of a Halton sequence in the method's own space, beside its defaults: all points
for a ninth of the rounds, the best third of them for a third; the best of these is taken. It minimises the effort that
counts in the cell, communications to the goal or time. It has another start and other draws than the measured runs, and
accuracies on samples that are held out from training; of the test set it sees nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from caden.arena._outcomes import EFFORTS, Outcome, Outcomes
from caden.arena._suite import Cell, Suite, excluded
from caden.engine.statistics import Median, median
from caden.errors import CadenError, Interrupted, RunError
from caden.experiments.config import Experiment
from caden.experiments.store import RunStore
from caden.experiments.theory import start_and_curvature
from caden.experiments.tune import held_out, points
from caden.methods import CARDS

RUNGS = 2  # of successive halving, each with a third of the trials and three times the rounds


class Entry(NamedTuple):
    """A method in a cell."""

    cell: Cell
    method: str
    parameters: dict[str, Any]  # after tuning
    outcomes: list[Outcome]  # one per seed

    @property
    def server(self) -> bool:
        """Whether its agents meet through a server instead of the graph."""
        return self.method in CARDS and CARDS[self.method].server

    def costs(self, effort: str) -> list[float]:
        """Return what each seed spent to reach the goal; infinite if it did not."""
        return [o.efforts[effort] if o.reached else math.inf for o in self.outcomes]

    def effort(self, effort: str) -> Median | None:
        """Return the median with its interval; None if most seeds did not reach the goal."""
        cost = median(self.costs(effort))
        return None if cost.median is None else cost

    def table(self) -> dict[str, Any]:
        """Return the entry as JSON shows it."""
        efforts = {name: self.effort(name) for name in EFFORTS}
        return {
            **self.cell._asdict(),
            "method": self.method,
            "server": self.server,
            "reached": efforts[EFFORTS[0]] is not None,
            "seeds_reached": sum(o.reached for o in self.outcomes),
            "refused": {str(seed): o.refused for seed, o in enumerate(self.outcomes) if o.refused},
            **{name: None if cost is None else cost._asdict() for name, cost in efforts.items()},
            "parameters": self.parameters,
        }


class Standings(NamedTuple):
    """All entries, and who did not take part where and why.

    Methods with a server are entries, but not ranked: their messages do not follow the graph.
    """

    entries: list[Entry]
    excluded: list[dict[str, str]]  # problem, graph, condition, method, reason
    main: dict[Cell, str]  # the effort that counts in each cell

    def cells(self) -> list[Cell]:
        """Return the cells with entries, in order."""
        return list(dict.fromkeys(entry.cell for entry in self.entries))

    def ranking(self, cell: Cell, effort: str = "") -> list[tuple[Entry, float]]:
        """Return the ranked entries of a cell with their median efforts, the cheapest first; the others come last.

        By default, by the effort that counts in the cell.
        """
        effort = effort or self.main[cell]
        here = [e for e in self.entries if e.cell == cell and not e.server]
        ranked = [(e, m.median if (m := e.effort(effort)) and m.median is not None else math.inf) for e in here]
        return sorted(ranked, key=lambda pair: (pair[1], pair[0].method))

    def costs(self, effort: str = "", seeds: bool = True) -> dict[str, dict[str, float]]:
        """Return {method: {instance: cost}}; instances are cells and seeds, or cells alone with their median.

        By default, by the effort that counts in each cell.
        """
        table: dict[str, dict[str, float]] = {}
        for entry in (e for e in self.entries if not e.server):
            line = table.setdefault(entry.method, {})
            if seeds:
                costs = entry.costs(effort or self.main[entry.cell])
                line |= {f"{entry.cell}/{seed}": cost for seed, cost in enumerate(costs)}
            else:
                cost = entry.effort(effort or self.main[entry.cell])
                line[str(entry.cell)] = math.inf if cost is None or cost.median is None else cost.median
        return table


def missing(standings: Standings) -> dict[str, str]:
    """Return the problems in which nobody takes part for one common reason, such as data that are not there."""
    present = {entry.cell.problem for entry in standings.entries}
    reasons: dict[str, set[str]] = {}
    for row in standings.excluded:
        reasons.setdefault(row["problem"], set()).add(row["reason"])
    return {name: next(iter(why)) for name, why in reasons.items() if name not in present and len(why) == 1}


def unheard(standings: Standings, methods: Sequence[str]) -> dict[str, str]:
    """Return those of the methods that ran nowhere, with a reason."""
    present = {entry.method for entry in standings.entries}
    reasons = {row["method"]: row["reason"] for row in standings.excluded}
    return {name: reasons.get(name, "no cell admits it") for name in methods if name not in present}


def estimate(suite: Suite, cells: Sequence[Cell], methods: Sequence[str]) -> float:
    """Return the seconds that the runs take on one core like that on which the problems' `seconds` were measured."""
    total = 0.0
    for cell in cells:
        present = sum(not _reason(suite, suite.experiment(cell, method)) for method in methods)
        total += present * (RUNGS + len(suite.seeds)) * suite.problems[cell.problem]["arena"]["seconds"]
    return total


def _reason(suite: Suite, config: Experiment) -> str:
    """Return why a method is not measured in a cell, or ""."""
    left_out = suite.left_out if "batch_size" in config.problem else suite.left_out | suite.left_out_without_batches
    return left_out.get(config.method["name"], "") or excluded(config)


def hold(
    suite: Suite,
    cells: Sequence[Cell],
    methods: Sequence[str],
    outcomes: Outcomes,
    ended: Callable[[str, float], None] = lambda text, seconds: None,
) -> Standings:
    """Run the arena cell by cell; `ended` is called with a text and a part of `estimate` whenever a run has ended."""
    standings = Standings([], [], {cell: suite.effort(cell) for cell in cells})
    builder = RunStore(outcomes.folder)
    for cell in cells:
        done, table = 0.0, suite.problems[cell.problem]

        def count(config: Experiment, cell: Cell = cell, table: dict[str, Any] = table) -> None:
            nonlocal done
            seconds = table["arena"]["seconds"] * config.rounds / table["rounds"]
            done += seconds
            ended(f"{cell}: {_label(config.method['name'])}", seconds)

        entries, left_out = _hold_cell(suite, cell, methods, outcomes, builder, count)
        ended(str(cell), estimate(suite, [cell], methods) - done)  # trials and methods that did not run
        standings.entries.extend(entries)
        standings.excluded.extend({**cell._asdict(), "method": m, "reason": why} for m, why in left_out.items())
    return standings


def _hold_cell(
    suite: Suite,
    cell: Cell,
    methods: Sequence[str],
    outcomes: Outcomes,
    builder: RunStore,
    ended: Callable[[Experiment], None],
) -> tuple[list[Entry], dict[str, str]]:
    configs = {method: suite.experiment(cell, method) for method in methods}
    left_out = {_label(method): why for method, config in configs.items() if (why := _reason(suite, config))}
    configs = {method: config for method, config in configs.items() if _label(method) not in left_out}
    if not configs:
        return [], left_out
    try:
        anyone = next(iter(configs.values())).model_copy(
            update={"seed": suite.tuning_seed, "method": {"name": "caden"}}
        )
        trial = held_out(anyone)
        facts = outcomes.facts(trial, lambda: _facts(builder, trial))
    except Interrupted:
        raise
    except (CadenError, RunError) as error:  # its data are not on this machine, or the warm-up diverges
        return [], left_out | dict.fromkeys(map(_label, configs), str(error))
    for method in [m for m in configs if facts["dim"] > suite.largest.get(m, math.inf)]:
        left_out[method] = f"takes too long with more than {suite.largest[method]} parameters"
        del configs[method]
    tuned, refused = _tune(suite, cell, configs, facts["curvature"], outcomes, ended)
    plans = [
        configs[method].model_copy(update={"method": parameters, "seed": seed})
        for seed in suite.seeds  # first: a process keeps the problem that it built last
        for method, parameters in tuned.items()
    ]
    done, entries = outcomes.run(plans, ended), []
    for number, (method, table) in enumerate(tuned.items()):
        mine = done[number :: len(tuned)]
        if all(outcome.refused for outcome in mine):
            refused[_label(method)] = mine[0].refused
        else:
            entries.append(Entry(cell, _label(method), {k: v for k, v in table.items() if k != "name"}, mine))
    return entries, left_out | refused


def _facts(builder: RunStore, config: Experiment) -> dict[str, float]:
    problem = builder.build(config)[0]
    largest = float(start_and_curvature(config, problem)[1].max())
    return {"dim": problem.dim, "curvature": largest if largest > 0 else 1.0}


def _tune(
    suite: Suite,
    cell: Cell,
    configs: Mapping[str, Experiment],
    curvature: float,
    outcomes: Outcomes,
    ended: Callable[[Experiment], None],
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the best parameters of every method, and why some could not run at all."""
    alive: dict[str, list[dict[str, Any]]] = {}
    base: dict[str, Experiment] = {}
    for method, config in configs.items():
        base[method] = held_out(config.model_copy(update={"seed": suite.tuning_seed}))
        tried = points(suite.space(cell.problem, method), suite.trials - 1, curvature)
        alive[method] = [{"name": method}, *({"name": method, **point} for point in tried)]
    best: dict[tuple[str, str], Outcome] = {}
    refused: dict[str, str] = {}
    for rung in range(RUNGS):
        plans: list[tuple[str, Experiment]] = []
        for method, tables in alive.items():
            length = math.ceil(base[method].rounds / 3 ** (RUNGS - rung))
            todo = [t for t in tables if (known := best.get((method, str(t)))) is None or not known.reached]
            plans += [(method, base[method].model_copy(update={"method": t, "rounds": length})) for t in todo]
        done = outcomes.run([config for _, config in plans], ended)
        best |= {(method, str(config.method)): outcome for (method, config), outcome in zip(plans, done)}
        for method, tables in list(alive.items()):
            scored = [(best[method, str(t)], t) for t in tables]
            if all(outcome.refused for outcome, _ in scored):
                refused[_label(method)] = scored[-1][0].refused
                del alive[method]
                continue
            ranked = sorted(range(len(scored)), key=lambda n: (*scored[n][0].score(suite.effort(cell)), n))
            alive[method] = [scored[n][1] for n in ranked[: max(1, math.ceil(len(ranked) / 3))]]
    return {method: tables[0] for method, tables in alive.items()}, refused


def _label(method: str) -> str:
    """Return the name of a method; of one from a file, that of its function."""
    return method.rpartition(":")[2]
