"""Reports: one page that works offline, and every figure and table as files."""

from caden.report.model import Report, Section, Table, running_mean
from caden.report.page import html, write
from caden.report.runs import about, graph_of, labelled, load, of_runs, parameters, results
from caden.report.tables import markdown, write_table

__all__ = [
    "Report",
    "Section",
    "Table",
    "about",
    "graph_of",
    "html",
    "labelled",
    "load",
    "markdown",
    "of_runs",
    "parameters",
    "results",
    "running_mean",
    "write",
    "write_table",
]
