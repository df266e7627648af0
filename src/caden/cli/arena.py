"""`caden arena`."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caden.cli.arguments import Json, NoCode
from caden.cli.code import outside_code
from caden.cli.study import JOBS, Jobs
from caden.errors import CadenError

if TYPE_CHECKING:
    from pandas import DataFrame

    from caden.arena import Standings, Suite

Names = Annotated[str, typer.Option(metavar="NAMES", help="Only these, separated by commas.")]


def _names(option: str, text: str) -> list[str]:
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if text and not names:
        raise CadenError(f"`{option}` names nothing.")
    return names


def arena(
    quick: Annotated[bool, typer.Option("--quick", help="A few cells on data that come with the package.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="All cells; takes days and can be continued.")] = False,
    only: Names = "",
    problems: Names = "",
    graphs: Names = "",
    conditions: Names = "",
    method: Annotated[
        list[str] | None, typer.Option(metavar="FILE.py:FUNCTION", help="Enter your own method; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the outcomes; finished runs are not rerun.")] = Path("arena"),
    jobs: Jobs = JOBS,
    no_code: NoCode = False,
    as_json: Json = False,
) -> None:
    """Tune methods with equal budgets in many settings, and rank them by what they spend to reach fixed goals.

    Without options, in the 42 cells of the committed slice (docs/choosing.md), some of them on data that are fetched.
    """
    from rich.console import Console

    from caden.arena import Outcomes, chosen, estimate, hold, load_suite, missing, unheard, write
    from caden.cli import show
    from caden.engine.progress import CountBar
    from caden.errors import require_choice, require_integer
    from caden.experiments.tune import space_of
    from caden.methods import METHODS

    if quick and everything:
        raise CadenError("`--quick` and `--all` exclude each other.")
    require_integer("jobs", jobs, least=1)
    suite = load_suite()
    texts = {"--problems": problems, "--graphs": graphs, "--conditions": conditions}
    filters = [_names(option, text) for option, text in texts.items()]
    axes = {"problem": suite.problems, "graph": suite.graphs, "condition": suite.conditions}
    for wanted, (kind, known) in zip(filters, axes.items()):
        for word in wanted:
            require_choice(kind, word, known)
    cells = suite.everything() if everything else suite.cells(suite.slices["quick" if quick else "committed"])
    cells = chosen(cells, *filters)
    entrants = [require_choice("method", name, METHODS) for name in _names("--only", only)] or list(METHODS)
    with outside_code(no_code), redirect_stdout(sys.stderr):  # what methods print is not a result
        for name in method or []:
            source, _, own = name.rpartition(":")
            if not source or not own:
                raise CadenError(f"`--method` takes FILE.py:FUNCTION, got {name!r}.")
            if own in METHODS or [n.rpartition(":")[2] for n in method or []].count(own) > 1:
                raise CadenError(f"There is another method called {own}: rename the function in {name!r}.")
            space_of(name, needed=False)  # loads it
            entrants.append(name)
        seconds = estimate(suite, cells, entrants)
        size = f"{len(cells)} cell{'s' * (len(cells) > 1)}, {len(entrants)} methods"
        words = f"{size}: about {seconds / jobs / 60:.0f} minutes; finished runs are kept"
        Console(stderr=True).print(words, highlight=False)
        with CountBar("arena", seconds) as bar, Outcomes(out / "runs", jobs) as outcomes:
            standings = hold(suite, cells, entrants, outcomes, bar.advance)
    mode = " --quick" if quick else " --all" if everything else ""
    mode += f" --only {only}" if only else ""
    document = write(standings, suite, out, mode + "".join(f" --method {name}" for name in method or []))
    for problem, reason in missing(standings).items():
        Console(stderr=True).print(f"{problem} is left out: {reason}", highlight=False, soft_wrap=True)
    silent = unheard(standings, [name.rpartition(":")[2] for name in method or []])
    for name, reason in silent.items():
        Console(stderr=True).print(f"{name} ran nowhere: {reason}", highlight=False, soft_wrap=True)
    if as_json:
        show.as_json(document)
    else:
        _summary(standings, suite, out)
    if silent:
        raise typer.Exit(1)


def _summary(standings: "Standings", suite: "Suite", out: Path) -> None:
    from caden.arena import profiles, subject_of, winners
    from caden.cli import show

    table = winners(standings, of=subject_of(standings)).drop(columns=["second", "reached", "n"])
    table["effort"] = table["effort"].str.replace(r" \(.*\)| communications", "", regex=True)
    seeds = f"median of n = {len(suite.seeds)} seeds, intervals in {out / 'tables'}"
    _print(table, f"fewest communications, or seconds (s), to the goal, {seeds}")
    _print(profiles(standings), "share of instances (cells x seeds) solved within multiples of the best")
    show.path("page", out / "arena.html")
    show.path("tables", out / "tables")


def _print(cells: "DataFrame", title: str) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    first, *others = map(str, cells.columns)
    table = Table(Column(first, no_wrap=True), *others, title=title, box=None, padding=(0, 1, 0, 0))
    for row in cells.astype(str).to_numpy().tolist():
        table.add_row(*row)
    Console().print(table)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(arena)
