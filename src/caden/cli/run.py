"""`caden run`, `resume` and `compare`."""

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from caden.cli import show
from caden.cli.arguments import File, Json, Settings
from caden.engine import log
from caden.engine.history import RunDirectory
from caden.errors import CadenError, RunError, require_integer
from caden.experiments import forecast
from caden.experiments.compare import compare_experiment
from caden.experiments.config import Experiment, experiment
from caden.networks import cluster


def _stamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]


def _carry_out(config: Experiment, directory: Path, resume: bool, as_json: bool, **options: Any) -> None:
    """Run, and show also what a failed run recorded."""
    transport = cluster.join() if cluster.launched() else None
    speaks = transport is None or transport.rank == 0
    try:
        result = config.run(directory, resume, transport=transport, **options)
    except RunError as error:
        if error.result is not None and as_json and speaks:
            show.result(error.result, config, as_json)
        raise
    if speaks:
        show.result(result, config, as_json)


def _share(processes: int, agents: Any) -> None:
    """Start the same command again as several processes, and end with their exit code."""
    if isinstance(agents, int) and processes > agents:
        raise CadenError(f"{agents} agents cannot be spread over {processes} processes.")
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--processes=")]
    if "--processes" in given:
        at = given.index("--processes")
        del given[at : at + 2]
    sys.exit(cluster.start([sys.executable, "-m", "caden", *given], processes))


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
    config, job = experiment(file, settings or []), cluster.launched()
    if dry_run:
        estimate, _ = forecast.forecast(config)
        show.forecast(estimate, as_json)
        forecast.refuse(estimate, config)
        return
    again, first = job is not None and job.restarted, job is None or job.rank == 0
    if out is None:
        what = config.problem.get("data", config.problem["name"])
        name = f"{config.method['name']}-{what}-{_stamp() if job is None else job.name}"
        out = Path("runs") / name.replace(":", ".").replace("/", ".")
    elif out.exists() and not again and first:
        raise CadenError(f"{out} exists already; choose another directory, or resume that run.")
    if require_integer("processes", processes, least=1) > 1 and job is None:
        _share(processes, config.problem.get("agents"))
    built = forecast.refuse_if_too_large(config) if job is None else None
    callbacks = [log.tensorboard(events)] if events is not None and first else []
    _carry_out(config, out, again and out.exists(), as_json, callbacks=callbacks, built=built)


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


def compare(
    file: File = None,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas.")] = "caden,caden_gd,gt,adapd",
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Directory for all runs; by default a new one under runs/.")] = None,
    as_json: Json = False,
) -> None:
    """Run several methods on identical data, graph and start; parameters by --set compare.METHOD.KEY=VALUE."""
    config, out = experiment(file, settings or []), out or Path("runs") / f"compare-{_stamp()}"
    results = compare_experiment(config, [name.strip() for name in methods.split(",") if name.strip()], out)
    show.comparison(results, config.target, out, as_json)
    failed = [f"{name}: {result.failure}" for name, result in results.items() if result.failure]
    if failed:
        raise RunError("; ".join(failed))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (run, resume, compare):
        app.command()(command)
