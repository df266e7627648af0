"""A report of any runs: their directories in, figures and tables out."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from caden.engine.columns import COLUMNS, EFFORTS, to_target
from caden.engine.figures import figures
from caden.engine.history import Record, RunDirectory
from caden.errors import CadenError
from caden.graphs import GRAPHS, Graph
from caden.registry import make
from caden.report.model import Report, Section, Table, running_mean

Runs = Mapping[str, Sequence[Record]]  # label -> records that differ in their seed


def load(paths: Sequence[Path]) -> list[Record]:
    """The records of run directories; a folder of run directories stands for all of them."""
    found = []
    for path in paths:
        inside = sorted(p.parent for p in path.glob("*/versions.json"))
        if not inside and not (path / "versions.json").exists():
            raise CadenError(f"{path} is not a run directory, and there is none in it.")
        for place in inside or [path]:
            try:
                found.append(RunDirectory(place).record())
            except CadenError as error:
                if not inside:
                    raise
                warnings.warn(f"{error} It is left out.", stacklevel=2)
    return list({record.path.resolve(): record for record in found}.values())


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


_NOT_SAID = (
    "seed",
    "problem.seed",
    "graph.seed",
    "problem.execution",
    "checkpoint_every",
    "record_every",
    "target",
    "rounds",
)


def labelled(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group runs that differ only in their seed; a label is the method and what sets it apart from its namesakes."""
    settings = [{k: v for k, v in _flat(r.config).items() if k not in _NOT_SAID} for r in records]
    names = [s.get("method.name", r.path.name) for s, r in zip(settings, records)]
    found: dict[str, list[Record]] = {}
    for mine, name, record in zip(settings, names, records):
        same = [s for s, other in zip(settings, names) if other == name]
        keys = sorted({k for s in same for k in s if s.get(k) != mine.get(k)})
        short = [k.rpartition(".")[2] for k in keys]
        shown = [k if s == "name" or short.count(s) > 1 else s for k, s in zip(keys, short)]
        said = [f"{s}={_short(mine[k])}" for k, s in zip(keys, shown) if k in mine]
        found.setdefault(", ".join([name, *said]), []).append(record)
    return found


def of_runs(records: Sequence[Record], title: str, command: str = "") -> Report:
    """Figures of every measure that the runs have, the table of what they reached, and their parameters."""
    runs = labelled(records)
    lines = {label: [running_mean(r.history) for r in group] for label, group in runs.items()}
    targets = [r.summary["target"] for r in records if r.summary.get("target")]
    tables = [results("results", "What the runs reached", runs)]
    drawn = figures(lines, targets[0] if targets else None)
    sections = [Section("Results", [], drawn, tables), Section("Parameters", [], [], [parameters(runs)])]
    return Report(title, summary(runs), sections, graph_of(records[0]), provenance(records, command))


def summary(runs: Runs) -> list[str]:
    """Who wins at what, in sentences."""
    said = []
    targets = sorted({r.summary["target"] for group in runs.values() for r in group if r.summary.get("target")})
    for target in targets:
        mine = {label: group for label, group in runs.items() if all(r.summary.get("target") == target for r in group)}
        for column in EFFORTS:
            took = {label: _mean(group, to_target(column)) for label, group in mine.items()}
            order = sorted((v, k) for k, v in took.items() if math.isfinite(v))
            if not order:
                said.append(f"No run reached {target:.0%} mean accuracy.")
                break
            first = f"Fewest {COLUMNS[column].label} to {target:.0%}: {order[0][1]} with {order[0][0]:,.4g}"
            second = f"; next {order[1][1]} with {order[1][0]:,.4g} ({order[1][0] / order[0][0]:.2f} times)"
            said.append(first + (second if len(order) > 1 and order[0][0] > 0 else "") + ".")
    best = sorted(((_mean(g, "best_accuracy"), label) for label, g in runs.items()), reverse=True)
    best = [(value, label) for value, label in best if math.isfinite(value)]
    if best:
        said.append("Highest mean accuracy: " + ", ".join(f"{label} {value:.2%}" for value, label in best[:3]) + ".")
    return said


def _mean(group: Sequence[Record], key: str) -> float:
    """Mean over the seeds; infinite or not a number if one of them has none."""
    values = [r.summary.get(key) for r in group]
    missing = math.nan if key == "best_accuracy" else math.inf
    return missing if any(v is None for v in values) else sum(float(v or 0) for v in values) / len(values)


def results(name: str, title: str, runs: Runs, note: str = "") -> Table:
    """A row per label: what the target took, the highest accuracy, the end."""
    rows = []
    for label, group in runs.items():
        end = group[0].summary
        row: dict[str, Any] = {"method": label}
        if "best_accuracy" in end:
            target = end.get("target")
            if target is not None:
                for column in EFFORTS:
                    value, form = _mean(group, to_target(column)), ",.1f" if column == "seconds" else ",.0f"
                    name_ = to_target(column).removesuffix("_to_target")
                    row[f"{name_} to {target:.0%}"] = format(value, form) if math.isfinite(value) else "-"
            row["highest accuracy"] = f"{_mean(group, 'best_accuracy'):.2%}"
            row["final accuracy"] = f"{_mean(group, 'accuracy'):.2%}"
        row["relative error"] = f"{_mean(group, 'relative_error'):.2e}"
        rounds = sorted({int(r.summary["round"]) for r in group})
        row["rounds"] = " to ".join(f"{n:,}" for n in (rounds[0], rounds[-1])[: len(rounds)])
        row["runs"] = str(len(group))
        row["ended by"] = ", ".join(sorted({str(r.summary["stopped"]) for r in group}))
        rows.append(row)
    return Table(name, title, pd.DataFrame(rows).fillna("-"), note)


def parameters(runs: Runs, name: str = "parameters") -> Table:
    """The methods' own parameters, and the command that runs each again."""
    rows = []
    for label, group in runs.items():
        config = group[0].config
        said = ", ".join(f"{k}={_short(v)}" for k, v in _flat(config.get("method", {})).items() if k != "name")
        seeds = ", ".join(str(r.config.get("seed", 0)) for r in group)
        again = f"caden run {group[0].path / 'config.toml'}" if config else "started from Python"
        rows.append({"run": label, "parameters": said, "seeds": seeds, "command": again})
    return Table(name, "Parameters", pd.DataFrame(rows))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def graph_of(record: Record) -> Graph | None:
    """The graph of a run that says which one it had."""
    agents, seed = record.config.get("problem", {}).get("agents"), record.config.get("seed", 0)
    try:
        graph: Graph = make("graph", GRAPHS, record.config.get("graph", {}), agents=agents, seed=seed)
    except (CadenError, TypeError):  # started from Python, or a function of the user's that is gone
        return None
    return graph


def provenance(records: Sequence[Record], command: str) -> dict[str, str]:
    """Versions, machine and command."""
    versions = {k: v for k, v in records[0].versions.items() if k != "seed"}
    different = any({k: v for k, v in r.versions.items() if k != "seed"} != versions for r in records)
    found = {"versions and machine": ", ".join(f"{k} {v}" for k, v in versions.items())}
    if different:
        found["note"] = "The runs were not all made with the same versions on the same machine; these are the first's."
    return found | ({"command": command} if command else {})
