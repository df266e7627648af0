"""`caden plan`, `caden clock measure` and `caden clock answer`."""

from pathlib import Path
from typing import Annotated

import typer

from caden.cli.arguments import File, Json, NoCode, Settings
from caden.cli.code import outside_code
from caden.cli.study import JOBS, Jobs
from caden.errors import CadenError, require_positive


def plan(
    file: File = None,
    target: Annotated[float | None, typer.Option(help="Accuracy to reach; by default that of the file.")] = None,
    methods: Annotated[str, typer.Option(help="Method names, separated by commas.")] = "caden,gt,adapd",
    modes: Annotated[str, typer.Option(help="Any of wait, deadline and free.")] = "wait,deadline,free",
    steps: Annotated[str, typer.Option(help="Local steps to try.")] = "auto,5",
    bits: Annotated[str, typer.Option(help="Bits per number of short messages to try, besides whole ones.")] = "4",
    deadlines: Annotated[
        str, typer.Option(metavar="SHARES", help="Lengths of a round to try: quantiles of the agents' times.")
    ] = "",
    participation: Annotated[str, typer.Option(metavar="SHARES", help="Shares of awake agents to try.")] = "",
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs; finished ones are not rerun.")] = Path("plan"),
    jobs: Jobs = JOBS,
    no_code: NoCode = False,
    as_json: Json = False,
) -> None:
    """Compare methods and settings by the simulated time to a target. Needs a table [clock]."""
    from caden.cli import show
    from caden.experiments.config import DEFAULTS, experiment
    from caden.experiments.plan import plan as make_plan
    from caden.experiments.store import RunStore

    given = [*(settings or []), *([f"target={target}"] if target is not None else [])]
    short = [{}, *({"bits": _number("bits", word)} for word in _words(bits))]
    shares = [
        [_number(name, w) for w in _words(t)]
        for name, t in (("deadlines", deadlines), ("participation", participation))
    ]
    with outside_code(no_code):
        config = experiment(file, given, {k: v for k, v in DEFAULTS.items() if k != "target"})
        if config.target is None and config.tolerance is None:
            config = config.model_copy(update={"target": DEFAULTS["target"]})
        store, tried = RunStore(out, jobs=jobs), [_steps(word) for word in _words(steps)]
        ranking = make_plan(config, store, _words(methods), _words(modes), tried, short, *shares)
    show.plan(ranking, config, as_json)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _number(name: str, word: str) -> float:
    try:
        return int(word) if word.isdecimal() else float(word)
    except ValueError:
        raise CadenError(f"`--{name}` takes numbers, got {word!r}.") from None


def _steps(word: str) -> int | str:
    if word != "auto" and not word.isdecimal():
        raise CadenError(f'`--steps` takes numbers and "auto", got {word!r}.')
    return word if word == "auto" else int(word)


def measure(
    file: File = None,
    agent: Annotated[int, typer.Option(help="Number of the agent whose data this machine holds.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps to time.")] = 20,
    link: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Machine on which `caden clock answer` runs.")
    ] = None,
    settings: Settings = None,
    no_code: NoCode = False,
    as_json: Json = False,
) -> None:
    """Time an agent's steps on this machine, and a link. Print a table [clock]."""
    import tomli_w

    from caden.cli import show
    from caden.experiments import calibrate
    from caden.experiments.config import experiment

    if link is not None:
        calibrate.require_answer(link)  # before anything is measured
    with outside_code(no_code):
        config = experiment(file, settings or [])
        machine = calibrate.measure_machine(config, agent, steps)
    line = None if link is None else calibrate.measure_link(link)
    clock = {"clock": calibrate.as_clock(machine, line, calibrate.mode_of(config))}
    if as_json:
        show.as_json(clock)
    else:
        print(tomli_w.dumps(clock), end="")


def answer(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 7446,
    seconds: Annotated[float, typer.Option(help="How long to listen.")] = 600.0,
) -> None:
    """Answer `caden clock measure --link` from other machines."""
    from caden.experiments import calibrate

    served = calibrate.answer(host, port, require_positive("seconds", seconds))
    print(f"{served} measured")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(plan)
    clock = typer.Typer(help="Measure a machine and a link for simulations.", no_args_is_help=True)
    clock.command()(measure)
    clock.command()(answer)
    app.add_typer(clock, name="clock")
