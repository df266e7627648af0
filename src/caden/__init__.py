"""CADEN and its relatives: agents on a graph train one model together without a server."""

from caden import data, graphs, log, methods, parallel, problems, schedules, solvers, theory
from caden.core import Info, LocalSolver, Method, Objective, Problem, Round
from caden.errors import CadenError, Diverged, Interrupted, RunError
from caden.graphs import Graph
from caden.history import Result
from caden.run import Warmup, simulate

__version__ = "0.1.0"

__all__ = [
    "CadenError",
    "Diverged",
    "Graph",
    "Info",
    "Interrupted",
    "LocalSolver",
    "Method",
    "Objective",
    "Problem",
    "Result",
    "Round",
    "RunError",
    "Warmup",
    "data",
    "graphs",
    "log",
    "methods",
    "parallel",
    "problems",
    "schedules",
    "simulate",
    "solvers",
    "theory",
]
