"""The command line: parse, call, print. Exit code 0 is done, 1 a failed run, 2 bad input."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from caden import bench as benchmarks
from caden import check, cluster, data, forecast, log, schedules, show
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


def _carry_out(config: Experiment, directory: Path | None, resume: bool, as_json: bool, **options: Any) -> None:
    """Run, and show also what a failed run recorded."""
    try:
        result = config.run(directory, resume, **options)
    except RunError as error:
        if error.result is not None and as_json and cluster.rank() == 0:
            show.result(error.result, config, as_json)
        raise
    if cluster.rank() == 0:
        show.result(result, config, as_json)


def _foretell(config: Experiment, as_json: bool) -> None:
    """Print a forecast; refuse what does not fit."""
    found, _ = forecast.forecast(config)
    if as_json:
        print(json.dumps(plain({**found._asdict(), "fits": found.fits})))
    else:
        gib = [f"{n / 2**30:.2f} GiB" for n in (found.state, found.problem, found.available)]
        print(f"state: {gib[0]} ({found.vectors:.0f} vectors per agent at the peak)\nproblem: {gib[1]}")
        print(f"available: {gib[2]}")
        if not math.isnan(found.seconds):  # otherwise nothing was made that could be timed
            print(f"time per round: about {found.seconds:.2g} s")
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
    built = None if cluster.launched() else forecast.check(config)
    callbacks = [] if events is None or cluster.rank() else [log.tensorboard(events)]
    _carry_out(config, out, again and out.exists(), as_json, callbacks=callbacks, built=built)


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
    built = None
    for name, plan in plans.items():
        try:
            built = forecast.check(plan, built)
        except CadenError as error:
            raise CadenError(f"{name}: {error}") from None
    problem, graph = built or next(iter(plans.values())).build()[1:]
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
        show.comparison(summaries, config.target)
        Console().print(f"picture: {out / 'compare.png'}", soft_wrap=True)
    if failed:
        raise RunError("; ".join(f"{name}: {why}" for name, why in failed.items()))


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
    show.theory(found)


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
    console = Console()
    console.print(show.tuned(found))
    console.print(f"all trials: {out / 'trials.csv'}", soft_wrap=True)
    again = f"caden compare {out / 'tuned.toml'} --methods {','.join(names)}"
    console.print(f"compare them on the test set: {again}", soft_wrap=True)


@app.command("reproduce")
def reproduce_(
    parts: Annotated[list[str] | None, typer.Argument(metavar="[PART...]")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tenth of the data and of the rounds, a small network.")
    ] = False,
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
        console = Console(stderr=True)
        found = dict(
            track(
                check.check(list(METHODS)), "checking", len(METHODS), console=console, disable=not console.is_terminal
            )
        )
        print(json.dumps(plain(found)) if as_json else show.check_table(found))
        return
    kinds = list(KINDS) if kind == "all" else [choose("kind", kind, KINDS)]
    if as_json:
        print(json.dumps({k: show.entries(k, KINDS[k]) for k in kinds}))
        return
    console = Console()
    for k in kinds:
        console.print(show.listing(k, KINDS[k]))


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
    Console().print(show.speed(found, last))


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
    except (RuntimeError, MemoryError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, MemoryError) or "allocate memory" in line:
            print(f"caden: There is not enough memory: {line.rpartition(': ')[2].partition('. ')[0]}.", file=sys.stderr)
            sys.exit(2)
        if not cluster.launched():
            raise
        print(f"caden: rank {cluster.rank()} lost its job: {line}", file=sys.stderr)
        sys.exit(1)
