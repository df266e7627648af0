"""What the commands print: tables for people, or one JSON object."""

import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from caden import data
from caden.engine.columns import COLUMNS, EFFORTS, to_target
from caden.engine.history import Result, jsonable
from caden.experiments.bench import Measure
from caden.experiments.config import Experiment
from caden.experiments.forecast import Forecast
from caden.experiments.method_check import SETTINGS, verdict
from caden.experiments.tune import Tuned


def as_json(value: Any) -> None:
    """One JSON object on one line."""
    print(json.dumps(jsonable(value)))


def path(what: str, where: Path | str) -> None:
    """Say where something is, in one line however long."""
    Console().print(f"{what}: {where}", soft_wrap=True)


def result(result: Result, config: Experiment, json_wanted: bool) -> None:
    """Print what a run gave."""
    summary = result.summary()
    if json_wanted:
        folder, said = result.directory, config.model_dump(exclude_none=True)
        as_json(
            {"summary": summary, "history": result.rows, "config": said, "directory": str(folder) if folder else None}
        )
        return
    title = f"{config.method['name']} on {config.problem.get('data', config.problem['name'])}"
    table = Table("measure", title=title, min_width=44)
    table.add_column("value", justify="right")
    if "accuracy" in summary:
        table.add_row("final mean accuracy", COLUMNS["accuracy"].text(summary["accuracy"]))
        table.add_row("best mean accuracy", COLUMNS["accuracy"].text(summary["best_accuracy"]))
    if summary.get("target") is not None:
        for name in ("round", "communications"):
            took = summary[to_target(name)]
            label = f"{to_target(name).removesuffix('_to_target')} to {summary['target']:.0%}"
            table.add_row(label, "not reached" if took is None else COLUMNS[name].text(took))
    shown = ("objective", "relative_error", "consensus", "dual_sum", "round", "communications", "gradients", "rejected")
    for name in (*shown, "mu_z", "seconds"):
        if summary.get(name) is not None:
            table.add_row(COLUMNS[name].label, COLUMNS[name].text(summary[name]))
    Console().print(table)
    if result.directory:
        path("run directory", result.directory)
        if (result.directory / "curves.png").exists():
            path("picture", result.directory / "curves.png")


def forecast(estimate: Forecast, json_wanted: bool) -> None:
    """What a run would take."""
    if json_wanted:
        as_json({**estimate._asdict(), "fits": estimate.fits})
        return
    gib = [f"{n / 2**30:.2f} GiB" for n in (estimate.state, estimate.problem, estimate.available)]
    print(f"state: {gib[0]} ({estimate.vectors:.0f} vectors per agent at the peak)\nproblem: {gib[1]}")
    print(f"available: {gib[2]}")
    if not math.isnan(estimate.seconds):  # otherwise nothing was made that could be timed
        print(f"time per round: about {estimate.seconds:.2g} s")


def comparison(results: Mapping[str, Result], target: float | None, folder: Path, json_wanted: bool) -> None:
    """A row per method; what the target took, where there is one."""
    summaries = {name: result.summary() for name, result in results.items()}
    if json_wanted:
        failed = {name: result.failure for name, result in results.items() if result.failure}
        as_json({"summaries": summaries, "failed": failed, "directory": str(folder)})
        return
    columns = {"relative_error": "relative_error", "communications": "communications"}
    title, headings = None, {"accuracy": "final", "best_accuracy": "best", "communications": "sent"}
    if any("accuracy" in summary for summary in summaries.values()):
        columns = {"accuracy": "accuracy", "best_accuracy": "accuracy"}
        if target is not None:
            title = f"mean accuracy, and what it took to reach {target:.0%}"
            columns |= {to_target(name): name for name in EFFORTS}
            headings |= {to_target(name): name for name in EFFORTS}
            headings |= {to_target("round"): "rounds", to_target("communications"): "sent"}
    table = Table("method", title=title)
    for key, name in columns.items():
        table.add_column(headings.get(key, COLUMNS[name].label), justify="right")
    for label, summary in summaries.items():
        table.add_row(label, *(COLUMNS[name].text(summary.get(key)) for key, name in columns.items()))
    Console().print(table)
    path("picture", folder / "compare.png")


def theory(found: dict[str, Any], json_wanted: bool) -> None:
    """Two columns for plain tables, the constants side by side."""
    if json_wanted:
        as_json(found)
        return
    console = Console()

    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    printed, derived = found.pop("constants, printed"), found.pop("constants, derived")
    for title, table in found.items():
        grid = Table(title=title, title_justify="left", show_header=False, min_width=60)
        for key, value in table.items():
            if title == "theorem 1":
                have, need, holds = value
                sign = "<=" if key == "r^tau" else ">="
                grid.add_row(key, f"{have:.4g}", f"{sign} {need:.4g}", "holds" if holds else "does not hold")
            elif isinstance(value, dict):
                grid.add_row(key, ", ".join(f"{k} {text(v)}" for k, v in value.items()))
            else:
                grid.add_row(key, text(value))
        console.print(grid)
        if title == "corollary 1":
            sides = Table("", "printed", "derived", title="constants of theorem 1", title_justify="left", min_width=60)
            for key in printed:
                if key != "bound follows":
                    sides.add_row(key, text(printed[key]), text(derived[key]))
            sides.add_row(
                "", *("a bound follows" if t["bound follows"] else "no bound follows" for t in (printed, derived))
            )
            console.print(sides)


def tuned(winners: Mapping[str, Tuned], folder: Path, json_wanted: bool) -> None:
    """The winners of a tuning, and where everything is."""
    if json_wanted:
        as_json({name: {"parameters": t.parameters, **t.record.summary} for name, t in winners.items()})
        return
    table = Table("method", "best parameters", "rounds", "accuracy", title="tuned")
    for name, winner in winners.items():
        end = winner.record.summary
        said = ", ".join(f"{k}={v}" for k, v in winner.parameters.items())
        took, accuracy = end.get(to_target("round")), end.get("best_accuracy")
        table.add_row(name, said, COLUMNS["round"].text(took), COLUMNS["accuracy"].text(accuracy))
    Console().print(table)
    path("all trials", folder / "trials.csv")
    again = f"caden compare {folder / 'tuned.toml'} --methods {','.join(winners)}"
    path("compare them on the test set", again)


def _about(thing: str | Callable[..., Any]) -> tuple[str, str]:
    """Parameters and first line of the documentation."""
    if isinstance(thing, str):
        return "", thing
    hidden = ("dtype", "device")
    parameters = [
        name if p.default is p.empty else f"{name}={p.default!r}"
        for name, p in inspect.signature(thing).parameters.items()
        if name not in hidden
    ]
    return ", ".join(parameters), (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


def _policy(method: Callable[..., Any]) -> str:
    """What a method does about silent neighbours: the sentence of its module that begins "Sleeping agents:"."""
    for paragraph in (sys.modules[method.__module__].__doc__ or "").split("\n\n"):
        _, found, policy = " ".join(paragraph.split()).partition("Sleeping agents: ")
        if found:
            return f"Sleeping agents: {policy}"
    return ""


def _entries(kind: str, things: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Parameters and documentation of everything in a registry."""
    found = {}
    for name, thing in sorted(things.items()):
        parameters, about = _about(thing)
        found[name] = {"parameters": parameters, "about": about}
        if kind == "methods":
            found[name]["sleeping"] = _policy(thing)
    return found


def listing(kinds: Mapping[str, Mapping[str, Any]], json_wanted: bool) -> None:
    """What there is, by kind."""
    entries = {kind: _entries(kind, things) for kind, things in kinds.items()}
    if json_wanted:
        as_json(entries)
        return
    for kind, things in entries.items():
        table = Table("name", "what it is", title=kind, title_justify="left", expand=True, show_lines=True)
        for name, entry in things.items():
            lines = [entry["about"], entry.get("sleeping", ""), f"[dim]{entry['parameters']}[/dim]"]
            table.add_row(name, "\n".join(line for line in lines if line and line != "[dim][/dim]"))
        Console().print(table)


def datasets() -> None:
    """The data sets and whether they are on this machine."""
    table = Table("name", "what it is", "here")
    for name, about in data.DATASETS.items():
        table.add_row(name, about, "yes" if data.is_here(name) else "no")
    Console().print(table)


def speed(measures: list[Measure], last: Mapping[str, float], json_wanted: bool) -> None:
    """Ratios with their spread and goals, and what was measured last time."""
    if json_wanted:
        as_json({m.name: {"ratios": m.ratios, "goal": m.goal, "met": m.met} for m in measures})
        return
    table = Table(title="speed as ratios", padding=0)
    for column in ("ratio of times or sizes", "median", "least", "most", "goal", "last"):
        table.add_column(column, justify="left" if column.startswith("ratio") else "right")
    for m in measures:
        numbers = [f"{value:.3g}" for value in (m.median, min(m.ratios), max(m.ratios))]
        before = f"{last[m.name]:.3g}" if m.name in last else ""
        table.add_row(m.name, *numbers, f"{m.goal} {'met' if m.met else 'not met'}", before)
    Console().print(table)


def method_check(found: Mapping[str, dict[str, float | str]], json_wanted: bool) -> None:
    """Distances from the minimiser of a strongly convex problem, as Markdown."""
    if json_wanted:
        as_json(found)
        return
    rows = [["method", *SETTINGS], ["---"] * (1 + len(SETTINGS))]
    rows += [[name, *(verdict(value) for value in row.values())] for name, row in found.items()]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
