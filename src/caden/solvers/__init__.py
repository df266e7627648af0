"""Local solvers: how an agent works on its subproblem between two broadcasts."""

from collections.abc import Callable
from typing import Any

import torch

from caden.core import LocalSolver, Round
from caden.errors import CadenError, require_choice
from caden.registry import make
from caden.solvers._adam import adam as adam
from caden.solvers._agd import agd as agd
from caden.solvers._exact import exact as exact
from caden.solvers._gd import gd as gd
from caden.solvers._lbfgs import lbfgs as lbfgs
from caden.solvers._newton import newton as newton
from caden.solvers._torch_optim import torch_optim as torch_optim

SOLVERS: dict[str, Callable[..., LocalSolver]] = {
    "adam": adam,
    "agd": agd,
    "exact": exact,
    "gd": gd,
    "lbfgs": lbfgs,
    "newton": newton,
    "torch_optim": torch_optim,
}


def starting_point(start: str | None, solver: LocalSolver) -> Callable[[Round], bool]:
    """Return in which rounds local steps begin at the anchor, given "own", "anchor" or None: as the solver likes it."""
    if start is not None:
        require_choice("start", start, ("own", "anchor"))

    def at_anchor(round: Round) -> bool:
        if start == "anchor" and round.accuracy is not None:
            raise CadenError('`local_steps = "auto"` needs `start = "own"`: its rule measures the way from there.')
        return start == "anchor" or (start is None and solver.fresh and round.problem.stochastic)

    return at_anchor


def from_spec(spec: LocalSolver | str | dict[str, Any]) -> LocalSolver:
    """Return a solver from a solver, its name, or a table with `name` and parameters."""
    if isinstance(spec, LocalSolver):
        return spec
    table = {"name": "lbfgs", **spec} if isinstance(spec, dict) else {"name": spec}
    if not isinstance(table["name"], str):
        raise CadenError(f"`solver` must be a solver, a name or a table, got {spec!r}.")
    if hasattr(torch.optim, table["name"]) and table["name"] not in SOLVERS:
        raise CadenError(
            f'For an optimizer of PyTorch, `solver` is {{name = "torch_optim", optimizer = "{table["name"]}"}} in a '
            f"file, `caden.solvers.torch_optim(torch.optim.{table['name']})` in Python."
        )
    solver: LocalSolver = make("solver", SOLVERS, table)
    return solver
