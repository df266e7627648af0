"""What the commands print."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from caden import check
from caden.bench import Measure
from caden.config import Experiment
from caden.history import Result, plain

if TYPE_CHECKING:
    from caden.tune import Tuned


def result(result: Result, config: Experiment, as_json: bool) -> None:
    """Print what a run gave."""
    summary = result.summary()
    if as_json:
        whole = {
            "summary": summary,
            "history": result.rows,
            "config": config.model_dump(exclude_none=True),
            "directory": str(result.directory) if result.directory else None,
        }
        print(json.dumps(plain(whole)))
        return
    table = Table(
        title=f"{config.method['name']} on {config.problem.get('data', config.problem['name'])}", min_width=44
    )
    table.add_column("measure")
    table.add_column("value", justify="right")
    if "accuracy" in summary:
        table.add_row("final mean accuracy", f"{summary['accuracy']:.2%}")
        table.add_row("best mean accuracy", f"{summary['best_accuracy']:.2%}")
    if summary.get("target") is not None:
        rounds, sent = summary["rounds_to_target"], summary["communications_to_target"]
        table.add_row(f"rounds to {summary['target']:.0%}", "not reached" if rounds is None else f"{rounds}")
        table.add_row(f"communications to {summary['target']:.0%}", "not reached" if sent is None else _count(sent))
    for key, name, form in (
        ("objective", "sum of local losses", ".6g"),
        ("relative_error", "relative error", ".3e"),
        ("consensus", "distance from consensus", ".3e"),
        ("dual_sum", "norm of the sum of duals", ".3e"),
        ("round", "rounds", ","),
        ("communications", "communications", ","),
        ("gradients", "gradient evaluations", ","),
        ("rejected", "rejected trial points", ","),
        ("mu_z", "mu_z", ".4g"),
        ("seconds", "seconds (without metrics)", ".2f"),
    ):
        if summary.get(key) is not None:
            table.add_row(name, _count(summary[key]) if form == "," else format(summary[key], form))
    console = Console()
    console.print(table)
    if result.directory:
        console.print(f"run directory: {result.directory}", soft_wrap=True)
        if (result.directory / "curves.png").exists():
            console.print(f"picture: {result.directory / 'curves.png'}", soft_wrap=True)


def _count(value: float) -> str:
    """A number of things; of vectors there may be parts, such as the few scalars that agents agree on."""
    return format(round(value, 2), ",")


def comparison(summaries: dict[str, dict[str, Any]], target: float | None) -> None:
    """A row per method; what the target took, where there is one."""
    columns = {"relative_error": ("relative error", ".2e"), "communications": ("sent", ",")}
    title = None
    if any("accuracy" in summary for summary in summaries.values()):
        columns = {"accuracy": ("final", ".2%"), "best_accuracy": ("best", ".2%")}
        if target is not None:
            title = f"mean accuracy, and what it took to reach {target:.0%}"
            columns |= {"rounds_to_target": ("rounds", ","), "communications_to_target": ("sent", ",")}
            columns |= {"gradients_to_target": ("gradients", ","), "seconds_to_target": ("seconds", ".1f")}
    table = Table("method", title=title)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for name, summary in summaries.items():
        cells = [(summary.get(column), form) for column, (_, form) in columns.items()]
        table.add_row(name, *("-" if c is None else _count(c) if f == "," else format(c, f) for c, f in cells))
    Console().print(table)


def theory(found: dict[str, Any]) -> None:
    """Two columns for plain tables, the constants side by side."""
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


def tuned(found: dict[str, Tuned]) -> Table:
    """The winners of a tuning."""
    table = Table("method", "best parameters", "rounds", "accuracy", title="tuned")
    for name, winner in found.items():
        end = winner.record.summary
        took, accuracy = end.get("rounds_to_target"), end.get("best_accuracy")
        said = ", ".join(f"{k}={v}" for k, v in winner.parameters.items())
        table.add_row(name, said, "-" if took is None else str(took), "-" if accuracy is None else f"{accuracy:.2%}")
    return table


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
    for module in (method.__module__, "caden.methods._caden"):  # what has no module of its own is a form of CADEN
        for paragraph in (sys.modules[module].__doc__ or "").split("\n\n"):
            _, found, policy = " ".join(paragraph.split()).partition("Sleeping agents: ")
            if found:
                return f"Sleeping agents: {policy}"
    return ""


def entries(kind: str, things: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Parameters and documentation of everything in a registry."""
    found = {}
    for name, thing in sorted(things.items()):
        parameters, about = _about(thing)
        found[name] = {"parameters": parameters, "about": about}
        if kind == "methods":
            found[name]["sleeping"] = _policy(thing)
    return found


def listing(kind: str, things: dict[str, Any]) -> Table:
    """The same for reading."""
    table = Table("name", "what it is", title=kind, title_justify="left", expand=True, show_lines=True)
    for name, entry in entries(kind, things).items():
        lines = [entry["about"], entry.get("sleeping", ""), f"[dim]{entry['parameters']}[/dim]"]
        table.add_row(name, "\n".join(line for line in lines if line and line != "[dim][/dim]"))
    return table


def speed(found: list[Measure], last: dict[str, float]) -> Table:
    """Ratios with their spread and goals, and what was measured last time."""
    table = Table(title="speed as ratios", padding=0)
    for column in ("ratio of times or sizes", "median", "least", "most", "goal", "last"):
        table.add_column(column, justify="left" if column.startswith("ratio") else "right")
    for m in found:
        numbers = [f"{value:.3g}" for value in (m.median, min(m.ratios), max(m.ratios))]
        before = f"{last[m.name]:.3g}" if m.name in last else ""
        table.add_row(m.name, *numbers, f"{m.goal} {'met' if m.met else 'not met'}", before)
    return table


def check_table(found: dict[str, dict[str, float | str]]) -> str:
    """Distances from the minimiser of a strongly convex problem, as Markdown."""
    rows = [["method", *check.SETTINGS], ["---"] * (1 + len(check.SETTINGS))]
    rows += [[name, *(check.verdict(value) for value in row.values())] for name, row in found.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
