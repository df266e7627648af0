"""Several methods on the same problem, graph, start and draws."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from caden.core import Method, Problem
from caden.engine.columns import EFFORTS, MEASURES
from caden.engine.figures import Figure, draw
from caden.engine.history import Result
from caden.engine.simulate import simulate
from caden.errors import CadenError, Diverged, require_choice
from caden.experiments import forecast
from caden.experiments.config import Experiment
from caden.graphs import Graph


def compare(
    methods: Mapping[str, Method],
    problem: Problem,
    graph: Graph,
    rounds: int = 100,
    *,
    directory: Path | str | None = None,
    **options: Any,
) -> dict[str, Result]:
    """Run several methods in turn on the same problem, graph, start and draws.

    Args:
        methods: the methods by name.
        directory: where to save the runs, each in a directory of its name.
        options: those of `simulate`.

    Returns:
        {name: Result}; a method that diverged returns what it recorded, with `stopped` = "diverged" and `failure` set.

    >>> import caden
    >>> problem, graph = caden.problems.quadratic(agents=5, dim=3), caden.graphs.ring(5)
    >>> methods = {"caden": caden.methods.caden(mu_z=0.5), "gt": caden.methods.gt(0.3)}
    >>> results = caden.compare(methods, problem, graph, rounds=20)
    >>> {name: result.rows[-1]["communications"] for name, result in results.items()}
    {'caden': 200, 'gt': 400}
    """

    def one(name: str, method: Method) -> Result:
        folder = None if directory is None else Path(directory) / name
        return simulate(method, problem, graph, rounds, directory=folder, **options)

    return _run_all({name: partial(one, name, method) for name, method in methods.items()})


def compare_experiment(config: Experiment, names: Sequence[str], directory: Path) -> dict[str, Result]:
    """Run the methods that an experiment names, with its parameters for them, and draw compare.png."""
    plans = {name: config.with_method(name) for name in dict.fromkeys(names)}
    if not plans:
        raise CadenError("`--methods` names no method.")
    for name in config.compare:
        require_choice("key", f"compare.{name}", [f"compare.{n}" for n in plans])
    if directory.exists():
        raise CadenError(f"{directory} already exists: choose another directory.")
    built = None
    for name, plan in plans.items():
        try:
            built = forecast.refuse_if_too_large(plan, built)
        except CadenError as error:
            raise CadenError(f"{name}: {error}") from None
    built = built or next(iter(plans.values())).build()[1:]
    results = _run_all({n: partial(p.run, directory / n, built=built, picture=False) for n, p in plans.items()})
    lines = {name: [result.history] for name, result in results.items()}
    measure = "accuracy" if all("accuracy" in h[0] for h in lines.values()) else "relative_error"
    title = f"{MEASURES[measure].label} on {config.problem.get('data', config.problem['name'])}"
    panels = [
        Figure("", "", measure, lines, x, config.target) for x in EFFORTS if all(x in h[0] for h in lines.values())
    ]
    draw(panels, directory / "compare.png", title=title)
    return results


def _run_all(runs: Mapping[str, Callable[[], Result]]) -> dict[str, Result]:
    """Return the result of each; one that diverges does not stop the others."""
    results: dict[str, Result] = {}
    for name, run in runs.items():
        try:
            results[name] = run()
        except Diverged as error:
            if error.result is None:  # before the first round: nothing was recorded
                raise
            results[name] = error.result
    return results
