"""CADEN and its relatives: agents on a graph train one model together without a server."""

from caden import data, graphs, methods, problems, schedules, solvers, theory
from caden._tensor.parallel import keep_freed_memory
from caden._version import __version__ as __version__
from caden.core import Info, LocalSolver, Method, Objective, Problem, Round
from caden.engine import log
from caden.engine.history import Result
from caden.engine.options import Conditions, Keeping, Stopping
from caden.engine.simulate import simulate
from caden.engine.warmup import Warmup
from caden.errors import CadenError, Diverged, Interrupted, RunError
from caden.experiments.compare import compare
from caden.graphs import Graph

__all__ = [
    "CadenError",
    "Conditions",
    "Diverged",
    "Graph",
    "Info",
    "Interrupted",
    "Keeping",
    "LocalSolver",
    "Method",
    "Objective",
    "Problem",
    "Result",
    "Round",
    "RunError",
    "Stopping",
    "Warmup",
    "compare",
    "data",
    "graphs",
    "keep_freed_memory",
    "log",
    "methods",
    "problems",
    "schedules",
    "simulate",
    "solvers",
    "theory",
]
