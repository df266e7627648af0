"""What the commands print: tables for people, or one JSON object."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from caden import data
from caden.engine.columns import COLUMNS, EFFORTS, to_target
from caden.engine.figures import styles
from caden.engine.history import Result
from caden.engine.run_directory import jsonable
from caden.experiments.bench import Measure
from caden.experiments.config import Experiment
from caden.experiments.forecast import Forecast
from caden.experiments.method_check import SETTINGS, verdict
from caden.experiments.plan import FACTORS, Plan
from caden.experiments.tune import Tuned


def as_json(value: Any) -> None:
    """Print one JSON object on one line."""
    print(json.dumps(jsonable(value)))


def path(what: str, where: Path | str) -> None:
    """Print where something is, on one line however long."""
    Console().print(f"{what}: {where}", soft_wrap=True)


def result(result: Result, config: Experiment, json_wanted: bool) -> None:
    """Print the result of a run."""
    if json_wanted:
        directory = str(result.directory) if result.directory else None
        settings = config.model_dump(exclude_none=True)
        as_json({"summary": result.summary(), "history": result.rows, "config": settings, "directory": directory})
        return
    title = f"{config.method['name']} on {config.problem.get('data', config.problem['name'])}"
    table = Table("measure", title=title, min_width=44)
    table.add_column("value", justify="right")
    for label, text in result.table():
        table.add_row(label, text)
    Console().print(table)
    if result.directory:
        path("run directory", result.directory)
        if (result.directory / "curves.png").exists():
            path("picture", result.directory / "curves.png")


def forecast(estimate: Forecast, json_wanted: bool) -> None:
    """Print the estimated memory and time of a run."""
    if json_wanted:
        as_json({**estimate._asdict(), "fits": estimate.fits})
        return
    gib = [f"{n / 2**30:.2f} GiB" for n in (estimate.state, estimate.problem, estimate.available)]
    print(f"state: {gib[0]} ({estimate.vectors:.0f} vectors per agent at the peak)\nproblem: {gib[1]}")
    print(f"available: {gib[2]}")
    if not math.isnan(estimate.seconds):  # otherwise there was nothing to time
        print(f"time per round: about {estimate.seconds:.2g} s")


def comparison(results: Mapping[str, Result], target: float | None, folder: Path, json_wanted: bool) -> None:
    """Print one row per method, with the cost of reaching the target if there is one."""
    summaries = {name: result.summary() for name, result in results.items()}
    if json_wanted:
        failures = {name: result.failure for name, result in results.items() if result.failure}
        as_json({"summaries": summaries, "failed": failures, "directory": str(folder)})
        return
    columns = {"relative_error": "relative_error", "communications": "communications"}
    title, headings = None, {"accuracy": "final", "best_accuracy": "best"}
    if any("accuracy" in summary for summary in summaries.values()):
        columns = {"accuracy": "accuracy", "best_accuracy": "accuracy"}
        if target is not None:
            title = f"mean accuracy, and the cost of reaching {target:.0%}"
            efforts = [name for name in EFFORTS if any(to_target(name) in s for s in summaries.values())]
            columns |= {to_target(name): name for name in efforts}
            headings |= {to_target(name): to_target(name).removesuffix("_to_target") for name in efforts}
    table = Table("method", title=title)
    for key, name in columns.items():
        table.add_column(headings.get(key, COLUMNS[name].label), justify="right")
    colours = styles(summaries)
    for label, summary in summaries.items():
        cells = (COLUMNS[name].text(summary.get(key)) for key, name in columns.items())
        table.add_row(Text(label, colours[label][0]), *cells)  # the colour of its line in the picture
    Console().print(table)
    path("picture", folder / "compare.png")


def plan(found: Plan, config: Experiment, json_wanted: bool) -> None:
    """Print the variants of a plan, the fastest first, and which is the fastest at other bandwidths."""
    rate = _rate(config)
    goal = f"{config.target:.0%}" if config.target is not None else f"a relative error of {config.tolerance:g}"
    if json_wanted:
        variants = [
            variant._asdict() | {"label": variant.label, "times": dict(zip(map(str, FACTORS), variant.times))}
            for variant in found.variants
        ]
        best = found.variants[0].label if found.variants and found.variants[0].reached else None
        changes = [
            {"bandwidth_factor": factor, "bandwidth": None if rate is None else rate * factor, "best": label}
            for factor, label in found.best_from
        ]
        goals = {"target": config.target, "tolerance": config.tolerance}
        picture = str(found.picture) if found.picture.exists() else None
        ranking = {"variants": variants, "best": best, "skipped": found.skipped, "best_from": changes}
        as_json({**goals, **ranking, "picture": picture})
        return
    title, awake = f"simulated cost of reaching {goal}", any(v.awake for v in found.variants)
    names = ["", "method", "steps", "mode", *(["awake"] if awake else []), "messages"]
    table = Table(*names, title=title, padding=(0, 1, 0, 0))
    for name in ("seconds", "MB per agent", "gradients"):
        table.add_column(name, justify="right")
    for number, v in enumerate(found.variants):
        costs = ("not reached", "", "")
        if v.reached:
            costs = (f"{v.time:,.1f}", f"{(v.bytes_per_agent or 0) / 1e6:,.3g}", f"{v.gradients:,}")
        first = number == 0 and v.reached
        level = [v.awake.removesuffix(" awake")] if awake else []
        row = ["*" if first else "", v.method, str(v.local_steps), v.mode, *level, v.messages]
        table.add_row(*row, *costs, style="bold" if first else None)
    Console().print(table)
    for why in dict.fromkeys(found.skipped.values()):
        labels = "; ".join(label for label, reason in found.skipped.items() if reason == why)
        Console().print(f"not run, {why}: {labels}", highlight=False)
    unit, words = (1.0, "as multiples of the given") if rate is None else (rate / 1e6, "in MB/s")
    if found.best_from:
        print(f"fastest by bandwidth, {words} (from runs at 0.1, 1 and 10 times it):")
    for (factor, label), (upper, _) in zip(found.best_from, [*found.best_from[1:], (10.0, "")]):
        print(f"  {unit * factor:.2g} to {unit * upper:.2g}: {label}")
    if found.picture.exists():
        path("picture", found.picture)


def _rate(config: Experiment) -> float | None:
    """Return the bandwidth of the links, if it is one number."""
    rates = [v for k in ("bandwidth", "up", "down") if (v := (config.clock or {}).get(k)) is not None]
    return float(rates[0]) if len(rates) == 1 and isinstance(rates[0], int | float) else None


def theory(report: dict[str, Any], json_wanted: bool) -> None:
    """Print the theory report: plain tables in two columns, the constants side by side."""
    if json_wanted:
        as_json(report)
        return
    console = Console()

    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    printed, derived = report.pop("constants, printed"), report.pop("constants, derived")
    for title, table in report.items():
        grid = Table(title=title, title_justify="left", show_header=False, min_width=60)
        for key, value in table.items():
            if title == "theorem 1":
                have, need, holds = value
                sign = "<=" if key == "r^tau" else ">="
                grid.add_row(key, f"{have:.4g}", f"{sign} {need:.4g}", "holds" if holds else "does not hold")
            elif key == "tau" and value > 1000:
                grid.add_row(key, f"{value:.2e} local steps per round, more than any run can afford")
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
            diverges = "must diverge" in report["stability"]["verdict"]
            follows = "a bound would follow, yet the run diverges (below)" if diverges else "a bound follows"
            sides.add_row("", *(follows if t["bound follows"] else "no bound follows" for t in (printed, derived)))
            console.print(sides)


def tuned(winners: Mapping[str, Tuned], folder: Path, json_wanted: bool) -> None:
    """Print the best parameters of each method, and where the trials are."""
    if json_wanted:
        as_json({name: {"parameters": t.parameters, **t.record.summary} for name, t in winners.items()})
        return
    table = Table("method", "best parameters", "rounds", "accuracy", title="tuned")
    for name, winner in winners.items():
        end = winner.record.summary
        parameters = ", ".join(f"{k}={v}" for k, v in winner.parameters.items())
        rounds, accuracy = end.get(to_target("round")), end.get("best_accuracy")
        table.add_row(name, parameters, COLUMNS["round"].text(rounds), COLUMNS["accuracy"].text(accuracy))
    Console().print(table)
    path("all trials", folder / "trials.csv")
    command = f"caden compare {folder / 'tuned.toml'} --methods {','.join(winners)}"
    path("compare them on the test set", command)


def datasets() -> None:
    """Print the data sets and whether they are on this machine."""
    table = Table("name", "description", "on this machine")
    for name, about in (data.DATASETS | data.TEXTS).items():
        table.add_row(name, about, "yes" if data.is_here(name) else "no")
    Console().print(table)


def speed(measures: list[Measure], last: Mapping[str, float], json_wanted: bool) -> None:
    """Print ratios with their spread and goals, and the last measurement."""
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


def method_check(distances: Mapping[str, dict[str, float | str]], json_wanted: bool) -> None:
    """Print distances from the minimiser of a strongly convex problem, as Markdown."""
    if json_wanted:
        as_json(distances)
        return
    rows = [["method", *SETTINGS], ["---"] * (1 + len(SETTINGS))]
    rows += [[name, *(verdict(value) for value in row.values())] for name, row in distances.items()]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
