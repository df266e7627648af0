"""What theory predicts for an experiment before it runs."""

from typing import Any

from torch import Tensor

from caden import schedules, theory
from caden.core import Problem
from caden.curvature import smoothness
from caden.draws import Draw
from caden.engine.warmup import start_point, warm_up
from caden.errors import CadenError, require_positive
from caden.experiments.config import Experiment
from caden.methods import CARDS
from caden.methods._auto import first_penalty
from caden.schedules import Participation, Workload


def start_and_curvature(config: Experiment, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the point where runs start after the warm-up, and (k,) the curvature of each f_i there."""
    x, curvature = warm_up(problem, start_point(problem), config.warmup)
    return x, smoothness(problem, x) if curvature is None else curvature


def theory_report(config: Experiment) -> dict[str, Any]:
    """Return conditions, constants, stability, rate and a recommendation for an experiment with CADEN, as tables."""
    name = config.method["name"]
    if name not in CARDS or not CARDS[name].theory:
        raise CadenError(f"The theory covers CADEN only, got {name!r}: use `--set method.name=caden`.")
    _, problem, graph = config.build()
    x, curvature = start_and_curvature(config, problem)
    mu_z = config.method.get("mu_z", "auto")
    if mu_z == "auto":
        mu_z = float(first_penalty(curvature.max(), graph))
    draw = Draw(config.seed, graph.agents)
    work = Workload(config.workload, draw)
    return theory.report(
        problem,
        graph,
        x,
        require_positive("method.mu_z", mu_z),
        config.method.get("mu_y"),
        config.method.get("relax", 0.5),
        Participation(schedules.from_spec(config.participation), draw).probability(0),
        max(1, int(work(0).min())) if work.accuracy is None else 1,
    )
