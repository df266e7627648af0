"""`caden run`, `resume` and `compare`."""

from __future__ import annotations

import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from caden import launcher
from caden.cli.arguments import File, Json, NoCode, Settings
from caden.cli.code import outside_code
from caden.errors import CadenError, RunError, require_integer

if TYPE_CHECKING:
    from caden.experiments.config import Experiment


def _stamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]


def _run_and_show(config: Experiment, directory: Path, resume: bool, as_json: bool, **options: Any) -> None:
    """Run an experiment and print its result; with --json, also what a failed run recorded."""
    from caden.cli import show
    from caden.networks import cluster

    transport = cluster.join() if launcher.launched() else None
    first = transport is None or transport.rank == 0
    try:
        result = config.run(directory, resume, transport=transport, **options)
    except RunError as error:
        if error.result is not None and as_json and first:
            show.result(error.result, config, as_json)
        raise
    if first:
        for note in result.problem.notes():
            warnings.warn(note, stacklevel=2)
        show.result(result, config, as_json)


def _start_processes(processes: int, agents: Any) -> None:
    """Start the same command again as several processes, and end with their exit code."""
    if isinstance(agents, int) and processes > agents:
        raise CadenError(f"{agents} agents cannot be spread over {processes} processes.")
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--processes=")]
    if "--processes" in arguments:
        position = arguments.index("--processes")
        del arguments[position : position + 2]
    sys.exit(launcher.start([sys.executable, "-m", "caden", *arguments], processes))


def run(
    file: File = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default a new one under runs/.")] = None,
    events: Annotated[Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard event files.")] = None,
    processes: Annotated[int, typer.Option(help="Number of processes to spread the agents over.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Estimate memory and time without running.")] = False,
    no_code: NoCode = False,
    as_json: Json = False,
) -> None:
    """Run an experiment. Without a file, run the paper's setting on the embedded digits."""
    from caden.cli import show
    from caden.experiments import forecast
    from caden.experiments.config import experiment

    if dry_run:
        with outside_code(refuse=True, why="`--dry-run` only estimates"):
            config = experiment(file, settings or [])
            estimate, _ = forecast.forecast(config)
        show.forecast(estimate, as_json)
        forecast.refuse(estimate, config)
        return
    with outside_code(no_code):
        _run(experiment(file, settings or []), out, events, processes, as_json)


def _run(config: Experiment, out: Path | None, events: Path | None, processes: int, as_json: bool) -> None:
    from caden.engine import log
    from caden.experiments import forecast

    job = launcher.launched()
    restarted, first = job is not None and job.attempt > 0, job is None or job.rank == 0
    if out is None:
        data = config.problem.get("data", config.problem["name"])
        name = f"{config.method['name']}-{data}-{_stamp() if job is None else job.name}"
        out = Path("runs") / name.replace(":", ".").replace("/", ".")
    elif out.exists() and not restarted and first:
        raise CadenError(f"{out} already exists: choose another directory, or resume that run.")
    if require_integer("processes", processes, least=1) > 1 and job is None:
        _start_processes(processes, config.problem.get("agents"))
    built = forecast.refuse_if_too_large(config) if job is None else None
    callbacks = [log.tensorboard(events)] if events is not None and first else []
    _run_and_show(config, out, restarted and out.exists(), as_json, callbacks=callbacks, built=built)


def resume(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    processes: Annotated[int, typer.Option(help="Number of processes; may differ from before.")] = 1,
    no_code: NoCode = False,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run. It ends with the same bytes as an uninterrupted run."""
    from caden.engine.run_directory import RunDirectory
    from caden.experiments.config import experiment

    file = directory / "config.toml"
    if not file.is_file():
        raise CadenError(
            f"{directory} has no config.toml, so it cannot be resumed from here (a run started from Python continues "
            "with simulate(..., resume=True))."
        )
    with outside_code(no_code):
        config = experiment(file, defaults={})
        if RunDirectory(directory).complete():
            raise CadenError(f"{directory} is complete: there is nothing to resume.")
        if require_integer("processes", processes, least=1) > 1 and launcher.launched() is None:
            _start_processes(processes, config.problem.get("agents"))
        _run_and_show(config, directory, True, as_json)


def compare(
    file: File = None,
    methods: Annotated[str, typer.Option(help="Method names, separated by commas.")] = "caden,caden_gd,gt,adapd",
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Directory for all runs; by default a new one under runs/.")] = None,
    no_code: NoCode = False,
    as_json: Json = False,
) -> None:
    """Run several methods on the same data, graph and start. Set parameters with --set compare.METHOD.KEY=VALUE."""
    from caden.cli import show
    from caden.experiments.compare import compare_experiment
    from caden.experiments.config import experiment

    out = out or Path("runs") / f"compare-{_stamp()}"
    with outside_code(no_code):
        config = experiment(file, settings or [])
        results = compare_experiment(config, [name.strip() for name in methods.split(",") if name.strip()], out)
    show.comparison(results, config.target, out, as_json)
    failures = [f"{name}: {result.failure}" for name, result in results.items() if result.failure]
    if failures:
        raise RunError("; ".join(failures))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (run, resume, compare):
        app.command()(command)
