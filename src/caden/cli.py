"""The command line: parse, call, print. Exit code 0 is done, 1 a failed run, 2 bad input."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from caden import bench as benchmarks
from caden import check, cluster, data, forecast, log, schedules
from caden.config import Experiment, experiment
from caden.errors import CadenError, RunError, choose, positive, whole
from caden.graphs import GRAPHS
from caden.history import Result, RunDirectory, plain
from caden.methods import METHODS
from caden.methods._caden import START
from caden.peers import _cli as peers_cli
from caden.plan import Store
from caden.problems import PROBLEMS
from caden.run import start_point, warm_up
from caden.schedules import Draw, Participation, Workload
from caden.solvers import SOLVERS
from caden.theory import smoothness

app = typer.Typer(
    help="Decentralized optimization: agents on a graph train one model together without a server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets: list and fetch.", no_args_is_help=True)
app.add_typer(data_app, name="data")
peers_cli.register(app)

File = Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT.toml]")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")]
Jobs = Annotated[int, typer.Option(help="Processes that share the cores, each with a run at a time.")]
JOBS = min(4, os.cpu_count() or 1)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def _show(result: Result, config: Experiment, as_json: bool) -> None:
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
        table.add_row(f"communications to {summary['target']:.0%}", "not reached" if sent is None else f"{sent:,}")
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
            table.add_row(name, format(summary[key], form))
    console = Console()
    console.print(table)
    if result.directory:
        console.print(f"run directory: {result.directory}", soft_wrap=True)
        if (result.directory / "curves.png").exists():
            console.print(f"picture: {result.directory / 'curves.png'}", soft_wrap=True)


def _carry_out(config: Experiment, directory: Path | None, resume: bool, as_json: bool, **options: Any) -> None:
    """Run, and show also what a failed run recorded."""
    try:
        result = config.run(directory, resume, **options)
    except RunError as error:
        if error.result is not None and as_json and cluster.rank() == 0:
            _show(error.result, config, as_json)
        raise
    if cluster.rank() == 0:
        _show(result, config, as_json)


def _foretell(config: Experiment, as_json: bool) -> None:
    """Print a forecast; refuse what does not fit."""
    found = forecast.forecast(config)
    if as_json:
        print(json.dumps({**found._asdict(), "fits": found.fits}))
    else:
        gib = [f"{n / 2**30:.2f} GiB" for n in (found.state, found.problem, found.available)]
        print(f"state: {gib[0]} ({found.vectors:.0f} vectors per agent at the peak)\nproblem: {gib[1]}")
        print(f"available: {gib[2]}\ntime per round: about {found.seconds:.2g} s")
    forecast.refuse(found, config)


@app.command()
def run(
    file: File = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default a new one under runs/.")] = None,
    events: Annotated[Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard event files.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that share the agents, as under torchrun.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what memory and time it would take.")] = False,
    as_json: Json = False,
) -> None:
    """Run an experiment; without a file the paper's setting on the embedded digits."""
    config = experiment(file, settings or [])
    if dry_run:
        _foretell(config, as_json)
        return
    if not cluster.launched() and processes == 1:
        forecast.check(config)
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # torchrun started the job anew
    if out is None:
        what = config.problem.get("data", config.problem["name"])
        stamp = cluster.job() if cluster.launched() else datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
        out = Path("runs") / f"{config.method['name']}-{what}-{stamp}".replace(":", ".").replace("/", ".")
    elif out.exists() and not again and cluster.rank() == 0:
        raise CadenError(f"{out} exists already; choose another directory, or resume that run.")
    agents = config.problem.get("agents")
    if whole("processes", processes, least=1) > 1 and isinstance(agents, int) and processes > agents:
        raise CadenError(f"{agents} agents cannot be spread over {processes} processes.")
    if processes > 1 and not cluster.launched():
        given = [a for a in sys.argv[1:] if not a.startswith("--processes=")]
        if "--processes" in given:
            place = given.index("--processes")
            del given[place : place + 2]
        sys.exit(cluster.start([sys.executable, "-m", "caden", *given], processes))
    callbacks = [] if events is None or cluster.rank() else [log.tensorboard(events)]
    _carry_out(config, out, again and out.exists(), as_json, callbacks=callbacks)


@app.command()
def compare(
    file: File = None,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas.")] = "caden,caden_gd,gt,adapd",
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Directory for all runs; by default a new one under runs/.")] = None,
    as_json: Json = False,
) -> None:
    """Run several methods on identical data, graph and start; parameters by --set compare.METHOD.KEY=VALUE."""
    config = experiment(file, settings or [])
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    plans = {name: config.with_method(name) for name in names}
    for name in config.compare:
        choose("key", f"compare.{name}", [f"compare.{n}" for n in names])
    if not plans:
        raise CadenError("`--methods` names no method.")
    out = out or Path("runs") / datetime.now().strftime("compare-%Y%m%d-%H%M%S-%f")[:-3]
    if out.exists():
        raise CadenError(f"{out} exists already; choose another directory.")
    _, problem, graph = next(iter(plans.values())).build()
    results: dict[str, Result] = {}
    failed: dict[str, str] = {}
    for name, plan in plans.items():
        try:
            results[name] = plan.run(out / name, built=(problem, graph), picture=False)
        except RunError as error:
            failed[name] = str(error)
            if error.result is not None:
                results[name] = error.result
    from caden import report as reports

    lines = {name: [r.history] for name, r in results.items()}
    measure = "accuracy" if all("accuracy" in h[0] for h in lines.values()) else "relative_error"
    four = [reports.Figure("", "", measure, lines, x, config.target) for x in list(reports.AXES)[:4]]
    reports.draw(four, out / "compare.png")
    summaries = {name: result.summary() for name, result in results.items()}
    if as_json:
        print(json.dumps(plain({"summaries": summaries, "failed": failed, "directory": str(out)})))
    else:
        _show_comparison(summaries, config.target)
        Console().print(f"picture: {out / 'compare.png'}", soft_wrap=True)
    if failed:
        raise RunError("; ".join(f"{name}: {why}" for name, why in failed.items()))


def _show_comparison(summaries: dict[str, dict[str, Any]], target: float | None) -> None:
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
        cells = [summary.get(column) for column in columns]
        table.add_row(name, *("-" if c is None else format(c, f) for c, (_, f) in zip(cells, columns.values())))
    Console().print(table)


@app.command()
def theory(file: File = None, settings: Settings = None, as_json: Json = False) -> None:
    """Say what is known of an experiment before it is run: conditions, constants, stability, rate, a recommendation."""
    from caden.theory._report import report

    config = experiment(file, settings or [])
    if config.method["name"] not in ("caden", "caden_gd"):
        raise CadenError(f"The theory here is about CADEN, not {config.method['name']!r}: use --set method.name=caden.")
    _, problem, graph = config.build()
    draw = Draw(config.seed, graph.agents)
    x, curvature = start_point(problem, None), None
    if config.warmup:
        x, curvature = warm_up(problem, x, config.warmup)
    mu_z = config.method.get("mu_z", "auto")
    if mu_z == "auto":
        curvature = smoothness(problem, x) if curvature is None else curvature
        mu_z = START * float(curvature.max()) / float(graph.degrees.mean())
    found = report(
        problem,
        graph,
        x,
        positive("method.mu_z", mu_z),
        config.method.get("mu_y"),
        config.method.get("relax", 0.5),
        Participation(schedules.from_spec(config.participation), draw).probability(0),
        max(1, int(Workload(schedules.from_spec(config.local_steps), draw)(0).min())),
    )
    if as_json:
        print(json.dumps(plain(found)))
        return
    _show_theory(found)


def _show_theory(found: dict[str, Any]) -> None:
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


@app.command()
def resume(directory: Annotated[Path, typer.Argument(metavar="RUN")], as_json: Json = False) -> None:
    """Go on with an interrupted run; it ends in the same bytes as one that was not interrupted."""
    file = directory / "config.toml"
    if not file.is_file():
        raise CadenError(
            f"{directory} is not a run directory of this command: it has no config.toml (a run started from Python "
            "goes on with simulate(..., resume=True))."
        )
    config = experiment(file, defaults={})
    if RunDirectory(directory).weights.exists():
        raise CadenError(f"{directory} is complete; there is nothing to resume.")
    _carry_out(config, directory, True, as_json)


@app.command("tune")
def tune_(
    method: Annotated[str, typer.Argument(metavar="METHOD|all")],
    file: File = None,
    settings: Settings = None,
    trials: Annotated[int, typer.Option(help="Points of the search space.")] = 18,
    rounds: Annotated[int, typer.Option(help="Rounds of each; the best third gets 3 times, the best ninth 9.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder of the trials; what is there is not run again.")] = Path("tuning"),
    jobs: Jobs = JOBS,
    as_json: Json = False,
) -> None:
    """Tune methods with equal budgets, on training samples held out; spaces by --set tune.METHOD.KEY=..."""
    from caden.tune import SPACES, space_of, tune

    config, store = experiment(file, settings or []), Store(out, jobs=jobs)
    names = list(SPACES) if method == "all" else list(dict.fromkeys(name.strip() for name in method.split(",")))
    for name in names:
        space_of(name, config.tune.get(name, {}))
    for name in config.tune:
        choose("key", f"tune.{name}", [f"tune.{n}" for n in names])
    found = {name: tune(store, config, name, trials, rounds) for name in names}
    best = {name: tuned.parameters for name, tuned in found.items()}
    everything = pd.concat([t.trials.assign(method=name) for name, t in found.items()], ignore_index=True)
    everything.to_csv(out / "trials.csv", index=False, lineterminator="\n")
    problem = {k: v for k, v in config.problem.items() if k != "validation"}
    winners = config.model_copy(update={"compare": best, "tune": {}, "problem": problem})
    (out / "tuned.toml").write_text(winners.to_toml())
    if as_json:
        print(json.dumps(plain({name: {"parameters": best[name], **t.record.summary} for name, t in found.items()})))
        return
    table = Table("method", "best parameters", "rounds", "accuracy", title="tuned")
    for name, tuned in found.items():
        end = tuned.record.summary
        took, accuracy = end.get("rounds_to_target"), end.get("best_accuracy")
        said = ", ".join(f"{k}={v}" for k, v in tuned.parameters.items())
        table.add_row(name, said, "-" if took is None else str(took), "-" if accuracy is None else f"{accuracy:.2%}")
    console = Console()
    console.print(table)
    console.print(f"all trials: {out / 'trials.csv'}", soft_wrap=True)
    again = f"caden compare {out / 'tuned.toml'} --methods {','.join(names)}"
    console.print(f"compare them on the test set: {again}", soft_wrap=True)


@app.command("reproduce")
def reproduce_(
    parts: Annotated[list[str] | None, typer.Argument(metavar="[PART...]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the data and of the rounds.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the page; what is there is not run again.")] = Path(
        "results"
    ),
    jobs: Jobs = JOBS,
) -> None:
    """Run the paper's experiments and more, and write the page about them; parts: fig1, fig2, table1, tuned ... all."""
    from caden import report as reports
    from caden import reproduce

    for part in parts or []:
        choose("part", part, [*reproduce.PARTS, "all"])
    chosen = list(reproduce.PARTS) if not parts or "all" in parts else list(dict.fromkeys(parts))
    console = Console(stderr=True)
    plan = reproduce.Plan(Store(out / "runs", jobs=jobs), reproduce.QUICK if quick else reproduce.FULL)
    for part in chosen:
        console.print(f"{part}: {reproduce.PARTS[part]}", highlight=False)
    minutes = reproduce.estimate(plan, chosen) / 60
    console.print(f"about {minutes:.0f} minutes from nothing; finished runs are not run again", highlight=False)
    command = shlex.join(["caden", "reproduce", *(parts or ["all"]), *(["--quick"] if quick else [])])
    page = reports.write(reproduce.build(plan, chosen, command), out)
    Console().print(f"page: {page}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="Folder for the page and its files.")] = Path("report"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Decentralized runs",
) -> None:
    """Write a page about runs (directories, or folders of them): figures, tables, parameters; also as files."""
    from caden import report as reports

    command = shlex.join(["caden", "report", *map(str, runs), "--title", title])
    page = reports.write(reports.of_runs(reports.load(runs), title, command), out)
    Console().print(f"page: {page}", soft_wrap=True)


KINDS: dict[str, dict[str, Any]] = {
    "methods": METHODS,
    "problems": PROBLEMS,
    "graphs": GRAPHS,
    "solvers": SOLVERS,
    "schedules": schedules.SCHEDULES,
    "partitions": data.PARTITIONS,
    "data": data.DATASETS,
}


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


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="[KIND]")] = "all",
    measured: Annotated[bool, typer.Option("--check", help="With methods: measure which reach the minimiser.")] = False,
    as_json: Json = False,
) -> None:
    """List methods, problems, graphs, solvers, schedules, partitions or data."""
    if measured:
        if kind != "methods":
            raise CadenError("`--check` goes with `caden list methods`.")
        _check_methods(as_json)
        return
    kinds = list(KINDS) if kind == "all" else [choose("kind", kind, KINDS)]
    found = {k: {name: _about(thing) for name, thing in sorted(KINDS[k].items())} for k in kinds}
    if as_json:
        listed: dict[str, dict[str, dict[str, str]]] = {
            k: {n: {"parameters": p, "about": a} for n, (p, a) in entries.items()} for k, entries in found.items()
        }
        for name, entry in listed.get("methods", {}).items():
            entry["sleeping"] = _policy(METHODS[name])
        print(json.dumps(listed))
        return
    console = Console()
    for title, entries in found.items():
        table = Table("name", "what it is", title=title, title_justify="left", expand=True, show_lines=True)
        for name, (parameters, about) in entries.items():
            policy = f"\n{_policy(METHODS[name])}" if title == "methods" else ""
            table.add_row(name, about + policy + (f"\n[dim]{parameters}[/dim]" if parameters else ""))
        console.print(table)


def _check_methods(as_json: bool) -> None:
    """Distances from the minimiser of a strongly convex problem, as Markdown or JSON."""
    console = Console(stderr=True)
    found = {}
    for name, row in track(
        check.check(list(METHODS)), "checking", len(METHODS), console=console, disable=not console.is_terminal
    ):
        found[name] = row
    if as_json:
        print(json.dumps(plain(found)))
        return
    print("| method | " + " | ".join(check.SETTINGS) + " |")
    print("|---|" + "---|" * len(check.SETTINGS))
    for name, row in found.items():
        print(f"| {name} | " + " | ".join(check.verdict(value) for value in row.values()) + " |")


@app.command()
def bench(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(benchmarks.PARTS)}; all.")] = None,
    repeats: Annotated[int, typer.Option(help="How often each ratio is measured.")] = 5,
    history: Annotated[Path, typer.Option(help="File that keeps all measurements.")] = Path("runs/bench.jsonl"),
    as_json: Json = False,
) -> None:
    """Measure the speed of this library here, as ratios to the machine's limit and to what one would write instead."""
    names = [choose("part", part, benchmarks.PARTS) for part in parts or benchmarks.PARTS]
    whole("repeats", repeats, least=1)
    found = []
    for measure in benchmarks.run(names, repeats):
        found.append(measure)
        if not as_json:
            print(f"{measure.name}: {measure.median:.3g}", file=sys.stderr)
    last = benchmarks.remember(history, found)
    if as_json:
        print(json.dumps({m.name: {"ratios": m.ratios, "goal": m.goal, "met": m.met} for m in found}))
        return
    table = Table(title="speed as ratios", padding=0)
    for column in ("ratio of times or sizes", "median", "least", "most", "goal", "last"):
        table.add_column(column, justify="left" if column.startswith("ratio") else "right")
    for m in found:
        numbers = [f"{value:.3g}" for value in (m.median, min(m.ratios), max(m.ratios))]
        before = f"{last[m.name]:.3g}" if m.name in last else ""
        table.add_row(m.name, *numbers, f"{m.goal} {'met' if m.met else 'not met'}", before)
    Console().print(table)


@data_app.command("list")
def data_list() -> None:
    """List the data sets and whether they are on this machine."""
    table = Table("name", "what it is", "here")
    for name, about in data.DATASETS.items():
        table.add_row(name, about, "yes" if data.is_here(name) else "no")
    Console().print(table)


@data_app.command("fetch")
def data_fetch(names: Annotated[list[str], typer.Argument(metavar="NAME...")]) -> None:
    """Fetch data sets and check them."""
    for name in names:
        files = data.fetch_data(name)
        Console().print(f"{name}: {files[0].parent if files else 'comes with scikit-learn'}", soft_wrap=True)


def main() -> None:
    """Entry point: errors and warnings are one line each on standard error."""
    warnings.showwarning = lambda message, *rest: print(f"caden: warning: {message}", file=sys.stderr)
    try:
        app()
    except (CadenError, RunError) as error:
        if cluster.rank() == 0:  # the other ranks have met the same
            print(f"caden: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, CadenError) else 1)
    except RuntimeError as error:
        if not cluster.launched():
            raise
        print(f"caden: rank {cluster.rank()} lost its job: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(1)
