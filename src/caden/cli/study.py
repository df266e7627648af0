"""`caden theory`, `tune`, `reproduce`, `report`, `list`, `bench` and `data`."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from caden.cli.arguments import File, Json, NoCode, Settings
from caden.cli.code import outside_code
from caden.errors import CadenError, require_choice, require_integer

Jobs = Annotated[
    int, typer.Option(help="Number of processes that share the cores; each runs one experiment at a time.")
]
JOBS = min(4, os.cpu_count() or 1)
KINDS = ("methods", "problems", "graphs", "solvers", "schedules", "partitions", "data")
BENCHMARKS = ("many", "million", "networks", "paper", "small")


def theory(file: File = None, settings: Settings = None, no_code: NoCode = False, as_json: Json = False) -> None:
    """Report what theory predicts for an experiment.

    This covers conditions, constants, stability, rate and a recommendation.
    """
    from caden.cli import show
    from caden.experiments.config import experiment
    from caden.experiments.theory import theory_report

    with outside_code(no_code):
        report = theory_report(experiment(file, settings or []))
    show.theory(report, as_json)


def tune(
    method: Annotated[str, typer.Argument(metavar="METHOD|all", help="A method, several separated by commas, or all.")],
    file: File = None,
    settings: Settings = None,
    trials: Annotated[int, typer.Option(help="Number of points to try in the search space.")] = 18,
    rounds: Annotated[
        int, typer.Option(help="Rounds per trial; 3 times as many for the best third, 9 for the best ninth.")
    ] = 20,
    out: Annotated[Path, typer.Option(help="Folder for the trials; finished ones are not rerun.")] = Path("tuning"),
    jobs: Jobs = JOBS,
    no_code: NoCode = False,
    as_json: Json = False,
) -> None:
    """Tune methods with equal budgets on held-out samples. Set search spaces with --set tune.METHOD.KEY=..."""
    from caden.cli import show
    from caden.experiments.config import experiment
    from caden.experiments.store import RunStore
    from caden.experiments.tune import tune_experiment
    from caden.methods import METHODS

    names = list(METHODS) if method == "all" else list(dict.fromkeys(name.strip() for name in method.split(",")))
    with outside_code(no_code):
        tuned = tune_experiment(experiment(file, settings or []), names, RunStore(out, jobs=jobs), trials, rounds)
    show.tuned(tuned, out, as_json)


def reproduce(
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="PART", help="fig1, fig2, table1, ...; all by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use a tenth of the data and rounds, and a small network.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the page; finished runs are not rerun.")] = Path(
        "results"
    ),
    jobs: Jobs = JOBS,
) -> None:
    """Run the paper's experiments and more. Write a page of results."""
    from rich.console import Console

    from caden import report, reproduce
    from caden.cli import show
    from caden.experiments.store import RunStore

    for part in parts or []:
        require_choice("part", part, [*reproduce.PARTS, "all"])
    chosen = list(reproduce.PARTS) if not parts or "all" in parts else list(dict.fromkeys(parts))
    console = Console(stderr=True)
    plan = reproduce.Plan(RunStore(out / "runs", jobs=jobs), reproduce.QUICK if quick else reproduce.FULL)
    for part in chosen:
        console.print(f"{part}: {reproduce.PARTS[part]}", highlight=False)
    minutes = reproduce.estimate(plan, chosen) / 60
    console.print(f"about {minutes:.0f} minutes from scratch; finished runs are not run again", highlight=False)
    command = shlex.join(["caden", "reproduce", *(parts or ["all"]), *(["--quick"] if quick else [])])
    show.path("page", report.write(reproduce.build(plan, chosen, command), out))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, or folders containing them.")],
    out: Annotated[Path, typer.Option(help="Folder for the page and its files.")] = Path("report"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Decentralized runs",
) -> None:
    """Write a page about runs. Its figures and tables are also written as files."""
    from caden import report as reports
    from caden.cli import show

    command = shlex.join(["caden", "report", *map(str, runs), "--title", title])
    show.path("page", reports.write(reports.of_runs(reports.load(runs), title, command), out))


def list_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.")] = "all",
    measured: Annotated[bool, typer.Option("--check", help="With methods: measure which reach the minimiser.")] = False,
    as_json: Json = False,
) -> None:
    """List methods, problems, graphs, solvers and more."""
    kinds = KINDS if kind == "all" else (require_choice("kind", kind, KINDS),)
    if measured and kind != "methods":
        raise CadenError("`--check` belongs to `caden list methods`.")
    if not measured:
        from caden.cli.listing import listing

        listing(kinds, as_json)
        return
    from rich.console import Console
    from rich.progress import track

    from caden.cli import show
    from caden.experiments.method_check import measure_methods
    from caden.methods import METHODS

    console = Console(stderr=True)
    silent = not console.is_terminal
    rows = track(measure_methods(list(METHODS)), "measuring", len(METHODS), console=console, disable=silent)
    show.method_check(dict(rows), as_json)


def bench(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(BENCHMARKS)}; all by default.")] = None,
    repeats: Annotated[int, typer.Option(help="How many times to measure each ratio.")] = 5,
    history: Annotated[Path, typer.Option(help="File that stores all measurements.")] = Path("runs/bench.jsonl"),
    as_json: Json = False,
) -> None:
    """Measure speed as ratios. The references are the hardware's limit and hand-written loops."""
    names = [require_choice("part", part, BENCHMARKS) for part in parts or BENCHMARKS]
    require_integer("repeats", repeats, least=1)
    from caden.cli import show
    from caden.experiments import bench as benchmarks

    measures = []
    for measure in benchmarks.run(names, repeats):
        measures.append(measure)
        if not as_json:
            print(f"{measure.name}: {measure.median:.3g}", file=sys.stderr)
    show.speed(measures, benchmarks.remember(history, measures), as_json)


def data_list() -> None:
    """List the data sets and whether they are on this machine."""
    from caden.cli import show

    show.datasets()


def data_fetch(names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names of data sets.")]) -> None:
    """Download and verify data sets."""
    from caden import data
    from caden.cli import show

    for name in names:
        files = data.fetch_data(name)
        show.path(name, files[0].parent if files else "comes with scikit-learn")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (theory, tune, reproduce, report, bench):
        app.command()(command)
    app.command("list")(list_)
    data_app = typer.Typer(help="List or download data sets.", no_args_is_help=True)
    data_app.command("list")(data_list)
    data_app.command("fetch")(data_fetch)
    app.add_typer(data_app, name="data")
