"""Reports about any runs, from their directories."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from caden.engine.columns import COLUMNS, EFFORTS, to_target
from caden.engine.figures import figures
from caden.engine.run_directory import Record, RunDirectory
from caden.engine.statistics import Median, median
from caden.errors import CadenError
from caden.graphs import Graph
from caden.report import waiting
from caden.report.model import Report, Section, Table, running_mean

Runs = Mapping[str, Sequence[Record]]  # label -> records that differ in their seed


def load(paths: Sequence[Path]) -> list[Record]:
    """Read run directories; a folder of run directories stands for all of them."""
    records = []
    for path in paths:
        inside = sorted(p.parent for p in path.glob("*/versions.json"))
        if not inside and not (path / "versions.json").exists():
            raise CadenError(f"{path} is not a run directory, and contains none.")
        for run_dir in inside or [path]:
            try:
                records.append(RunDirectory(run_dir).record())
            except CadenError as error:
                if not inside:
                    raise
                warnings.warn(f"{error} It is left out.", stacklevel=2)
    return list({record.path.resolve(): record for record in records}.values())


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a nested table with its keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


_NOT_IN_LABELS = (
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
    """Group runs that differ only in their seed; a label is the method and what distinguishes it from its namesakes."""
    settings = [{k: v for k, v in _flat(r.config).items() if k not in _NOT_IN_LABELS} for r in records]
    names = [s.get("method.name", r.path.name) for s, r in zip(settings, records)]
    groups: dict[str, list[Record]] = {}
    for setting, name, record in zip(settings, names, records):
        namesakes = [s for s, other in zip(settings, names) if other == name]
        keys = sorted({k for s in namesakes for k in s if s.get(k) != setting.get(k)})
        short = [k.rpartition(".")[2] for k in keys]
        shown = [k if s == "name" or short.count(s) > 1 else s for k, s in zip(keys, short)]
        differences = [f"{s}={_short(setting[k])}" for k, s in zip(keys, shown) if k in setting]
        groups.setdefault(", ".join([name, *differences]), []).append(record)
    return groups


def of_runs(records: Sequence[Record], title: str, command: str = "") -> Report:
    """Report on runs: figures of every measure, a table of results, and the parameters."""
    runs = labelled(records)
    lines = {label: [running_mean(r.history) for r in group] for label, group in runs.items()}
    targets = [r.summary["target"] for r in records if r.summary.get("target")]
    tables = [results("results", "Results", runs)]
    drawn = figures(lines, targets[0] if targets else None)
    sections = [Section("Results", [], drawn, tables), Section("Parameters", [], [], [parameters(runs)])]
    pictures = [waiting.drawing(f"waiting-{n}", label, group[0]) for n, (label, group) in enumerate(runs.items())]
    if shown := [picture for picture in pictures if picture is not None]:
        sections.insert(1, Section("Who waited for whom", drawings=shown))
    graph = graph_of(records[0])
    return Report(title, summary(runs), sections, setting(records, graph), graph, provenance(records, command))


def setting(records: Sequence[Record], graph: Graph | None = None) -> dict[str, str]:
    """Return what all runs share: data, partition, agents, graph, participation, local steps, rounds, target."""
    configs = [r.config for r in records]
    common: dict[str, str] = {}

    def add(name: str, values: Sequence[Any], form: str = "") -> None:
        texts = {_table_text(value) if form == "" else format(value, form) for value in values if value is not None}
        if len(texts) == 1:
            common[name] = texts.pop()

    problems = [c.get("problem", {}) for c in configs]
    add("data", [p.get("data", p.get("name")) for p in problems])
    add("partition", [p.get("partition") for p in problems])
    add("agents", [p.get("agents") for p in problems])
    if graph is not None and len({str(c.get("graph")) for c in configs}) == 1:
        common["graph"] = f"{graph.name}, {len(graph.edges)} edges"
    for name in ("participation", "local_steps", "rounds"):
        add(name.replace("_", " "), [c.get(name) for c in configs])
    add("target", [c.get("target") for c in configs], ".0%")
    return common


def _table_text(value: Any) -> str:
    """Return a value of a configuration as text: a table by its name and parameters."""
    if not isinstance(value, dict):
        return _short(value)
    rest = ", ".join(f"{k} = {_short(v)}" for k, v in value.items() if k != "name")
    return f"{value.get('name', '')} ({rest})" if rest else str(value.get("name", ""))


def summary(runs: Runs) -> list[str]:
    """Say in sentences which method is best at what."""
    sentences = []
    targets = sorted({r.summary["target"] for group in runs.values() for r in group if r.summary.get("target")})
    for target in targets:
        groups = {
            label: group for label, group in runs.items() if all(r.summary.get("target") == target for r in group)
        }
        for column in (c for c in EFFORTS if any(to_target(c) in r.summary for g in groups.values() for r in g)):
            costs = {label: _median(group, to_target(column), math.inf) for label, group in groups.items()}
            order = sorted((v.median, k) for k, v in costs.items() if v is not None and v.median is not None)
            if not order:
                sentences.append(f"No run reached {target:.0%} mean accuracy.")
                break
            first = f"Fewest {COLUMNS[column].label} to {target:.0%}: {order[0][1]} with {order[0][0]:,.4g}"
            second = ""
            if len(order) > 1 and order[0][0] > 0:
                second = f"; next {order[1][1]} with {order[1][0]:,.4g} ({order[1][0] / order[0][0]:.2f} times)"
            sentences.append(f"{first}{second}.")
    highest = {label: _median(group, "best_accuracy") for label, group in runs.items()}
    best = sorted(((v.median or 0.0, label) for label, v in highest.items() if v is not None), reverse=True)
    if best:
        sentences.append(
            "Highest mean accuracy: " + ", ".join(f"{label} {value:.2%}" for value, label in best[:3]) + "."
        )
    if sentences and (seeds := {len(group) for group in runs.values()}) != {1}:
        counts = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
        sentences.append(f"Medians of n = {counts} seeds; intervals are bootstrap intervals of the median, at 95 %.")
    return sentences


def _median(group: Sequence[Record], key: str, missing: float | None = None) -> Median | None:
    """Return the median over the seeds; one without a value counts as `missing`; if that is None, there is none."""
    values = [missing if (value := r.summary.get(key)) is None else value for r in group]
    return None if any(v is None for v in values) else median([float(v or 0) for v in values])


def _text(group: Sequence[Record], key: str, form: str, missing: float | None = None) -> str:
    value = _median(group, key, missing)
    return "-" if value is None else value.text(form, "-")


def results(name: str, title: str, runs: Runs, note: str = "") -> Table:
    """Return one row per label: the cost of the target, the highest accuracy, the end."""
    rows = []
    for label, group in runs.items():
        end = group[0].summary
        row: dict[str, Any] = {"method": label}
        if "best_accuracy" in end:
            target = end.get("target")
            if target is not None:
                for column in (c for c in EFFORTS if to_target(c) in end):
                    form = ",.1f" if column in ("seconds", "time") else ",.0f"
                    name_ = to_target(column).removesuffix("_to_target")
                    row[f"{name_} to {target:.0%}"] = _text(group, to_target(column), form, math.inf)
            row["highest accuracy"] = _text(group, "best_accuracy", ".2%")
            row["final accuracy"] = _text(group, "accuracy", ".2%")
        row["relative error"] = _text(group, "relative_error", ".2e")
        rounds = sorted({int(r.summary["round"]) for r in group})
        row["rounds"] = " to ".join(f"{n:,}" for n in (rounds[0], rounds[-1])[: len(rounds)])
        row["n"] = str(len(group))
        row["ended by"] = ", ".join(sorted({str(r.summary["stopped"]) for r in group}))
        rows.append(row)
    return Table(name, title, pd.DataFrame(rows).fillna("-"), note)


def parameters(runs: Runs, name: str = "parameters") -> Table:
    """Return the methods' own parameters, and the command that runs each again."""
    rows = []
    for label, group in runs.items():
        config = group[0].config
        values = ", ".join(f"{k}={_short(v)}" for k, v in _flat(config.get("method", {})).items() if k != "name")
        seeds = ", ".join(str(r.config.get("seed", 0)) for r in group)
        command = f"caden run {group[0].path / 'config.toml'}" if config else "started from Python"
        rows.append({"run": label, "parameters": values, "seeds": seeds, "command": command})
    return Table(name, "Parameters", pd.DataFrame(rows))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def graph_of(record: Record) -> Graph | None:
    """Return the graph of a run, from the edges in its directory; a report never calls what a file names."""
    return RunDirectory(record.path).graph()


def provenance(records: Sequence[Record], command: str) -> dict[str, str]:
    """Return the versions, the machine and the command."""
    versions = {k: v for k, v in records[0].versions.items() if k != "seed"}
    different = any({k: v for k, v in r.versions.items() if k != "seed"} != versions for r in records)
    entries = {"versions and machine": ", ".join(f"{k} {v}" for k, v in versions.items())}
    if different:
        entries["note"] = "The runs used different versions or machines; these are the first run's."
    return entries | ({"command": command} if command else {})
