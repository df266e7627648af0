"""Local solvers: what an agent does with its subproblem between two broadcasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from caden.core import LocalSolver
from caden.errors import CadenError, choose
from caden.solvers._adam import adam
from caden.solvers._exact import exact
from caden.solvers._gd import gd
from caden.solvers._lbfgs import lbfgs

__all__ = ["SOLVERS", "adam", "exact", "from_spec", "gd", "lbfgs"]

SOLVERS: dict[str, Callable[..., LocalSolver]] = {"adam": adam, "exact": exact, "gd": gd, "lbfgs": lbfgs}


def from_spec(spec: LocalSolver | str | dict[str, Any]) -> LocalSolver:
    """A solver from itself, its name, or a table with `name` and parameters."""
    if isinstance(spec, LocalSolver):
        return spec
    arguments = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = choose("solver", str(arguments.pop("name", "lbfgs")), SOLVERS)
    try:
        return SOLVERS[name](**arguments)
    except TypeError as error:
        raise CadenError(f"Solver {name!r}: {error}.") from None
